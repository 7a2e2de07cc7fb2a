"""Write a student in another program's format, or read one from there.

    python export_pdd.py --to videox_fun --run runs/mine --out exports/mine
    python export_pdd.py --to diffusers --steps 1 --out exports/one        # of the newest complete run: a stock pipeline
    python export_pdd.py --to diffusers --run runs/high --second runs/low --out exports/both      # two experts' students
    python export_pdd.py --from videox_fun FILE --base_model TEACHER --out students/theirs
    python export_pdd.py --from videox_fun FILE --base_model TEACHER --to comfyui --out exports/theirs

What is read becomes a student's folder, for load_student and ``sample_pdd.py --student``. An export is written whole or not at
all, with a model card. Nothing is unpickled.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pdd.config import ConfigError, Parser, status_of
from pdd.exchange import REGISTRY


def parser() -> Parser:
    flags = Parser(description=__doc__)
    names = ", ".join(REGISTRY)
    flags.add_argument("--to", metavar="FORMAT", help=f"format to write: {names}; a student's own folder if not given")
    flags.add_argument(
        "--from", dest="source", nargs=2, metavar=("FORMAT", "PATH"), help="format to read, and where from"
    )
    flags.add_argument(
        "--run", help="run folder whose student is written; the newest complete one under runs/ if not given"
    )
    flags.add_argument("--student", help="a student's folder, in the place of --run")
    flags.add_argument(
        "--second",
        metavar="RUN",
        help="the other expert's run folder or student's, to be written beside the first one's",
    )
    flags.add_argument("--out", help="folder to be created")
    flags.add_argument(
        "--base_model", help="the teacher's folder or a hub's owner/name; the one in the contract if not given"
    )
    flags.add_argument(
        "--base_name", metavar="NAME", help="the base model's name on a hub, where base_model is a folder"
    )
    flags.add_argument("--revision", help="the base model's revision, where it is a folder")
    flags.add_argument("--steps", type=int, metavar="K", help="forwards, of a format for one number of them")
    flags.add_argument("--shift", help="time shift of a file that does not say it, a number or modality: number; the base "
                       "model's scheduler's if not given")  # fmt: skip
    flags.add_argument(
        "--block_size_max", type=int, metavar="L", help="widest block trained, of a file that does not say it"
    )
    flags.add_argument("--layout", help="how the rows of a bank are laid out, of a file that does not say it")
    flags.add_argument(
        "--force", action="store_true", help="write a student whose noise levels are not the format's, too"
    )
    return flags


def main(argv: list[str]) -> int:
    return status_of("export_pdd.py", lambda: export(parser().parse_args(argv)))


def export(args) -> None:
    if not args.out:
        raise ConfigError("out is not given; allowed is the name of a new folder")
    if not args.to and not args.source:
        raise ConfigError(f"neither to nor from is given; allowed are formats: {', '.join(REGISTRY)}")
    out = Path(args.out)
    if out.exists() or out.is_symlink():
        raise ConfigError(f"out is {args.out!r}, which exists; allowed is a new folder")

    from pdd.exchange import format_of, formats
    from pdd.exchange.base import load_portable, new_folder, save_portable
    from pdd.exchange.card import write_card
    from pdd.formats import find_second, find_student
    from pdd.pipeline import Course

    for knob, name, function in (("to", args.to, "write"), ("from", args.source and args.source[0], "read")):
        if name and name not in formats(function):
            raise ConfigError(f"{knob} is {name!r}; allowed are {', '.join(formats(function))}")
    if args.source and (args.run or args.student):
        raise ConfigError("from is given and so is run or student; allowed is one of them")
    if args.second and (args.source or args.to != "diffusers" or args.steps):
        raise ConfigError(f"second is {args.second!r}; allowed is none but with --to diffusers, and without --steps")
    options = wanted(args)
    try:
        if args.source:
            students = [format_of(args.source[0]).read(Path(args.source[1]), options)]
        else:
            students = [load_portable(find_student(args.run, args.student), args.base_model)]
        if args.second:
            students = Course(*students, load_portable(find_second(args.second), args.base_model)).students
        with new_folder(out) as draft:
            for student in students:
                folder = draft / student.backbone.expert if args.second else draft
                if args.to:
                    format_of(args.to).write(student, folder, options)
                else:
                    save_portable(student, folder)
            if args.to:
                write_card(students, draft, args.to, options)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print(f"{args.to or 'student'} written to {out}")


def wanted(args):
    """The flags that formats look at.

    Raises:
        ConfigError: one that is nothing of its kind.
    """
    import yaml

    from pdd.exchange.base import LAYOUTS, Options

    for name in ("steps", "block_size_max"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; allowed is 1 or more")
    if args.layout is not None and args.layout not in LAYOUTS:
        raise ConfigError(f"layout is {args.layout!r}; allowed are {', '.join(LAYOUTS)}")
    shift = None
    if args.shift is not None:
        try:
            shift = yaml.safe_load(args.shift)
            shift = {str(k): float(v) for k, v in shift.items()} if isinstance(shift, dict) else {"": float(shift)}
        except (yaml.YAMLError, TypeError, ValueError):
            raise ConfigError(f"shift is {args.shift!r}; allowed is a number, or modality: number") from None
    return Options(
        args.base_model, args.base_name, args.revision, args.steps, shift, args.block_size_max, args.layout, args.force
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
