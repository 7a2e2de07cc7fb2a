"""Sample a student in a few forwards.

    python sample_pdd.py --steps 4                                   # the newest complete run under runs/
    python sample_pdd.py --steps 2 --run runs/mine --prompt "any digit" --prompt three --num 8 --seed 1
    python sample_pdd.py --tol 0.2                                   # as many forwards as the heads' disagreement asks for
    python sample_pdd.py --steps 1 2 4 8 --compare                   # beside its teacher: compare.png, compare.json

Plain torch: no DeepSpeed, one process. Prompts are looked up in the run's conditioning dataset.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pdd.config import Config, ConfigError, Parser, read_yaml, unknown


def parser() -> Parser:
    flags = Parser(description=__doc__)
    flags.add_argument("--steps", type=int, nargs="+", metavar="K", help="forwards per sample (default 4)")
    flags.add_argument(
        "--tol",
        type=float,
        metavar="T",
        help="instead of --steps: end a block where its heads part by more than T, such as 0.2",
    )
    flags.add_argument("--run", help="run folder; the newest complete one under runs/ if not given")
    flags.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    flags.add_argument("--prompts", help="text file of prompts, one a line")
    flags.add_argument("--num", type=int, help="samples per prompt (default 8; 500 with --compare)")
    flags.add_argument("--seed", type=int, default=0, help="seed of the noise (default 0)")
    flags.add_argument("--batch", type=int, default=100, help="samples per forward (default 100)")
    flags.add_argument("--out", help="folder of the pictures; the run folder if not given")
    flags.add_argument("--device", help="torch device; the first accelerator, else the CPU")
    flags.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="weights' precision; as stored if not given")
    flags.add_argument(
        "--compare", action="store_true", help="measure and draw student, teacher and Euler side by side"
    )
    flags.add_argument("--force", action="store_true", help="sample blocks wider than trained, too")
    return flags


def main(argv: list[str]) -> int:
    try:
        sample(parser().parse_args(argv))
        return 0
    except ConfigError as error:
        print(f"sample_pdd.py: error: {error}", file=sys.stderr, flush=True)
        return 2


def sample(args) -> None:
    import torch
    from tqdm import tqdm

    from pdd import run as runs
    from pdd.compare import compare
    from pdd.data import Rows
    from pdd.draws import noise
    from pdd.formats import read_student
    from pdd.pipeline import load_student, stock_pipeline
    from pdd.sampling import initial
    from pdd.student import FusedStudent

    run = Path(args.run) if args.run else runs.newest(complete=True)
    if run is None:
        raise ConfigError("there is no complete run under runs/; train one, or name one with --run")
    if not runs.is_complete(run):
        raise ConfigError(f"run {str(run)!r} has no finished student; allowed is the folder of a complete run")
    for name in ("num", "batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"{name} is {getattr(args, name)}; allowed is 1 or more")
    if args.tol is not None and (args.steps or args.compare or not args.tol >= 0):
        raise ConfigError(f"tol is {args.tol}; allowed is 0 or more, without --steps and --compare")
    config = Config(**read_yaml(run / "config.yaml"))
    device = args.device or (
        str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    )
    dtype = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    try:
        student = read_student(run / "student", dtype, device)
        steps = [] if args.tol is not None else args.steps or [4]
        partitions = {k: student.nodes(k, args.force) for k in dict.fromkeys(steps)}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for steps in partitions:
        if steps < student.facts["fewest_steps"]:
            print(f"warning: --force: {steps} forwards use blocks wider than trained", file=sys.stderr)
    rows = Rows(config, student.backbone)
    prompts = wanted_prompts(args, rows)
    print(f"run {run}", flush=True)
    out = Path(args.out) if args.out else run
    out.mkdir(parents=True, exist_ok=True)

    if args.compare:
        fused = FusedStudent(student.transformer, student.backbone, student.grid)
        picture, table = compare(
            fused, config, rows, prompts, partitions, args.num or 500, args.seed, args.batch, device
        )
        picture.save(out / "compare.png")
        runs.write_json(out / "compare.json", table)
        print(summary(table))
        print(f"picture {out / 'compare.png'}\ntable   {out / 'compare.json'}")
        return

    try:
        load = load_student if args.tol is None else stock_pipeline  # whose heads are read here, block by block
        pipe = load(student, text_encoders=False, force=args.force, device=device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler.finished = args.tol is not None
    prompts = prompts or [rows.prompts[i] for i in rows.trained[:4]]
    num = args.num or 8
    jobs = [(prompt, i) for prompt in prompts for i in range(num)]
    for steps in partitions or [None]:
        made, taken = [], []
        name = f"{steps} forwards" if steps else f"tol {args.tol:g}"
        for begin in tqdm(range(0, len(jobs), args.batch), unit="batch", desc=name, leave=False):
            chunk = jobs[begin : begin + args.batch]
            # a sample's noise depends on the seed and its number alone: the same at any step count and batch size
            eps = {
                m: torch.stack([noise(shape, args.seed, "sample", m, i) for _, i in chunk]).to(device, pipe.dtype)
                for m, shape in rows.latent_shapes.items()
            }
            cond = rows.cond(torch.tensor([rows.find(prompt) for prompt, _ in chunk]), device)
            state = initial(eps, student.grid)
            if steps is None:
                state, nodes = choose_blocks(student, state, cond, args.tol, args.force)
                taken += [len(nodes) - 1] * len(chunk)
            made += call(pipe, student.backbone, cond, state, steps or 1)
        used = f", {sum(taken) / len(taken):.2f} forwards a sample" if taken else ""
        stem = out / f"sample-{f'nfe{steps}' if steps else f'tol{args.tol:g}'}-seed{args.seed}"
        print(f"{name}{used}: {write(made, jobs, num, stem, pipe, student.backbone)}")


def choose_blocks(student, state, cond, tolerance: float, force: bool) -> tuple[dict, list[int]]:
    """The end of a batch's adaptive walk, and the nodes that it took."""
    from pdd.sampling import adaptive
    from pdd.student import Student, Velocity

    whole = Student(Velocity(student.transformer, student.backbone), student.grid)
    widest = student.grid.pdd_steps if force else student.facts["block_size_max"]
    dtypes, nodes = {m: x.dtype for m, x in state.items()}, []
    for node, state in adaptive(
        whole, {m: x.float() for m, x in state.items()}, cond, tolerance, student.starts, widest
    ):
        nodes.append(node)
    return {m: x.to(dtypes[m]) for m, x in state.items()}, nodes


def call(pipe, backbone, cond, state, steps: int) -> list:
    """One batch through the stock pipeline: (picture or frames in [0, 1], sound or None) of every sample."""
    decodes = getattr(pipe, "vae", None) is not None
    cond = {column: value.to(pipe.dtype) if value.is_floating_point() else value for column, value in cond.items()}
    result = pipe(
        **backbone.pipeline_condition(cond),
        **backbone.to_pipeline(state),
        **backbone.pipeline_arguments(),
        num_inference_steps=steps,
        output_type="pt" if decodes else "latent",
    )
    pixels = result[0] if decodes else (backbone.to_images(backbone.from_pipeline(result[0])) + 1) / 2
    sounds = result.audio if decodes and hasattr(result, "audio") else [None] * len(pixels)
    return list(zip(pixels.cpu(), sounds))


def write(made: list, jobs: list, num: int, stem: Path, pipe, backbone) -> Path:
    """Pictures as one grid; videos, and their sound, as files of their own in a folder, beside a grid of middle frames."""
    import torch

    from pdd.pictures import grid as picture_grid

    pixels = torch.stack([sample for sample, _ in made])
    middle = pixels if pixels.ndim == 4 else pixels[:, pixels.shape[1] // 2]
    picture = stem.with_name(stem.name + ".png")
    picture_grid(middle * 2 - 1, num).save(picture)
    if pixels.ndim == 4:
        return picture
    from pdd.media import write_sound, write_video

    stem.mkdir(exist_ok=True)
    for (frames, sound), (prompt, i) in zip(made, jobs):
        slug = "".join(c if c.isalnum() else "-" for c in prompt)[:40]
        rate = pipe.vocoder.config.output_sampling_rate if sound is not None else 0
        write_video(stem / f"{slug}-{i}.mp4", frames, backbone.frame_rate, sound, rate)
        if sound is not None:
            write_sound(stem / f"{slug}-{i}.wav", sound, rate)
    return stem


def wanted_prompts(args, rows) -> list[str]:
    """Prompts of the flags; empty when none was given.

    Raises:
        ConfigError: an unreadable file, or a prompt without a row in the dataset.
    """
    prompts = list(args.prompt or [])
    if args.prompts:
        try:
            prompts += [line.strip() for line in Path(args.prompts).read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts {args.prompts!r} cannot be read: {error}") from None
    for prompt in prompts:
        if prompt not in rows.prompts:
            raise unknown(f"data {str(rows.path)!r}: prompt", prompt, rows.prompts)
    return prompts


def summary(table: dict) -> str:
    """The comparison as text."""
    head = "forwards  endpoint error  (Euler)  Frechet  (Euler)  diversity"
    lines = [head]
    number = lambda value, width: f"{value:{width}.3f}" if value is not None else " " * (width - 1) + "-"  # noqa: E731
    for steps, r in table["steps"].items():
        cells = (r["endpoint_error"], r["euler_endpoint_error"], r["frechet"], r["euler_frechet"], r["diversity"])
        lines.append(f"{steps:>8}" + "".join(number(c, w) for c, w in zip(cells, (16, 9, 9, 9, 11))))
    teacher = table["teacher"]
    lines.append(f"{'teacher':>8}{'':25}{number(teacher['frechet'], 9)}{'':9}{number(teacher['diversity'], 11)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
