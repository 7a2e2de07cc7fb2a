"""Sample a student in a few forwards.

    python sample_pdd.py --steps 4                                   # the newest complete run under runs/
    python sample_pdd.py --steps 2 --run runs/mine --prompt "any digit" --prompt three --num 8 --seed 1
    python sample_pdd.py --tol 0.2                                   # as many forwards as the heads' disagreement asks for
    python sample_pdd.py --steps 1 2 4 8 --compare                   # beside its teacher: compare.png, compare.json
    python sample_pdd.py --steps 4 --run runs/high --second runs/low               # two experts, a run each: 2 + 2 forwards
    python sample_pdd.py --steps 24 --run runs/high --second teacher --second_steps 20   # one distilled: 4 + 20

Plain torch: no DeepSpeed, one process. Prompts are looked up in the run's conditioning dataset; where it lacks one, all are
encoded by the base model's text encoders, once, into a folder beside the run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from pdd.config import Config, ConfigError, Parser, status_of, unknown


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
    flags.add_argument("--student", help="a student's folder, in the place of --run")
    flags.add_argument(
        "--second",
        metavar="RUN",
        help="the other expert's run folder or student's, or teacher: the checkpoint's own, in Euler steps",
    )
    flags.add_argument(
        "--second_steps",
        type=int,
        metavar="K",
        help="how many of --steps are the second one's (default half, rounded down)",
    )
    flags.add_argument(
        "--second_guidance",
        type=float,
        metavar="SCALE",
        help="guidance of --second teacher; that of the run if not given",
    )
    flags.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    flags.add_argument("--prompts", help="text file of prompts, one a line")
    flags.add_argument("--num", type=int, help="samples per prompt (default 8; 500 with --compare)")
    flags.add_argument("--seed", type=int, default=0, help="seed of the noise (default 0)")
    flags.add_argument("--batch", type=int, default=100, help="samples per forward (default 100)")
    flags.add_argument("--out", help="folder of the pictures; the run folder if not given")
    flags.add_argument("--device", help="torch device; the first accelerator, else the CPU")
    flags.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="weights' precision; as stored if not given")
    flags.add_argument(
        "--offload", choices=["none", "model", "sequential"], default="none",
        help="keep on the accelerator only the component at work, or only its layer at work (default none)",
    )  # fmt: skip
    flags.add_argument("--tiling", action="store_true", help="decode in tiles, in less memory")
    flags.add_argument(
        "--compare", action="store_true", help="measure and draw student, teacher and Euler side by side"
    )
    flags.add_argument("--force", action="store_true", help="sample blocks wider than trained, too")
    return flags


def main(argv: list[str]) -> int:
    return status_of("sample_pdd.py", lambda: sample(parser().parse_args(argv)))


def sample(args) -> None:
    import torch
    from tqdm import tqdm

    from pdd import run as runs
    from pdd.compare import compare
    from pdd.data import Rows
    from pdd.draws import noise
    from pdd.formats import PRECISIONS, find_second, find_student, read_student, student_config
    from pdd.pipeline import TEACHER, Course, load_student, read_second
    from pdd.sampling import initial
    from pdd.student import FusedStudent

    folder = find_student(args.run, args.student)
    run = folder if args.student else folder.parent
    second = args.second if args.second in (None, TEACHER) else find_second(args.second)
    if args.compare and second is not None:
        raise ConfigError("compare is true; allowed is a student of the whole clock, without --second")
    for name in ("num", "batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"{name} is {getattr(args, name)}; allowed is 1 or more")
    if args.tol is not None and (args.steps or args.compare or second or args.offload != "none" or not args.tol >= 0):
        raise ConfigError(
            f"tol is {args.tol}; allowed is 0 or more, without --steps, --compare, --second and --offload"
        )
    config = student_config(folder)
    device = args.device or runs.own_device()
    if args.offload != "none" and torch.device(device).type == "cpu":
        raise ConfigError(f"offload is {args.offload!r} and the device is the CPU; allowed is none, or an accelerator")
    if args.compare and (args.offload != "none" or args.tiling):
        raise ConfigError("compare measures latents by its own sampler; allowed is neither offload nor tiling with it")
    dtype = PRECISIONS.get(args.dtype)
    try:
        home = device if args.offload == "none" else "cpu"
        student = read_student(folder, dtype, home)
        if second is not None:
            second = read_second(student, second, args.second_steps, dtype=dtype, device=home)
        course = Course(student, second, args.second_steps, args.force)
        steps = [] if args.tol is not None else args.steps or [4]
        partitions = {k: course.nodes(k) for k in dict.fromkeys(steps)}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for steps, walks in partitions.items():
        if any(len(nodes) <= one.facts["fewest_steps"] for one, nodes in zip(course.students, walks)):
            print(f"warning: --force: {steps} forwards use blocks wider than trained", file=sys.stderr)
    prompts = wanted_prompts(args)
    if args.student and prompts and not config.data_dir.is_dir():  # a student from elsewhere has no dataset
        config = replace(config, data=str(encoded_prompts(prompts, run, config, student, None, device)))
    rows = Rows(config, student.backbone)
    guided = lambda cond: {}  # noqa: E731
    if args.second == TEACHER:
        guided = second_guidance(args, config, student.backbone, rows)
    elif args.second_guidance is not None:
        raise ConfigError(f"second_guidance is {args.second_guidance}; allowed is none, without --second {TEACHER}")
    print(f"{'student' if args.student else 'run'} {run}", flush=True)
    if any(prompt not in rows.prompts for prompt in prompts):
        rows.look_up_in(encoded_prompts(prompts, run, config, student, rows, device))
    out = Path(args.out) if args.out else run
    out.mkdir(parents=True, exist_ok=True)

    if args.compare:
        partitions = {steps: nodes for steps, (nodes,) in partitions.items()}
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
        pipe = load_student(
            student, text_encoders=False, force=args.force, device=device, second=second, second_steps=args.second_steps,
            offload=args.offload, finished=args.tol is not None,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(str(error)) from None
    pipe.set_progress_bar_config(disable=True)
    if args.tiling:
        tile(pipe)
    prompts = prompts or [rows.prompts[i] for i in rows.trained[:4]]
    num = args.num or 8
    jobs = [(prompt, i) for prompt in prompts for i in range(num)]
    for steps in partitions or [None]:
        made, taken = [], []
        name = f"{steps} forwards" if steps else f"tol {args.tol:g}"
        bar = tqdm(total=len(jobs), unit="sample", desc=name, leave=False)
        hooks = show_progress(bar, pipe, steps)
        for begin in range(0, len(jobs), args.batch):
            chunk = jobs[begin : begin + args.batch]
            # a sample's noise depends on the seed and its number alone: the same at any step count and batch size
            eps = {
                m: torch.stack([noise(shape, args.seed, "sample", m, i) for _, i in chunk]).to(device, pipe.dtype)
                for m, shape in rows.latent_shapes.items()
            }
            cond = rows.cond(torch.tensor([rows.find(prompt) for prompt, _ in chunk]), device)
            state = initial(eps, course.students[0].grid)
            if steps is None:
                state, nodes = choose_blocks(student, state, cond, args.tol, args.force)
                taken += [len(nodes) - 1] * len(chunk)
            made += call(pipe, student.backbone, cond, state, steps or 1, guided)
            bar.update(len(chunk))
        for hook in hooks:
            hook.remove()
        bar.close()
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


def second_guidance(args, config: Config, backbone, rows):
    """Conditioning -> arguments of the pipeline that guide the checkpoint's own expert, as plainly as the pipeline does.

    Raises:
        ConfigError: a scale that the pipeline cannot use, or no cfg_uncond in the run's configuration.
    """
    from pdd.teacher import unconditional_condition

    scale = args.second_guidance
    if scale is None:
        scale = config.teacher_guidance_scale
        scale = scale.get(backbone.modalities[0], 1.0) if isinstance(scale, dict) else scale
    if not scale >= 1:
        raise ConfigError(f"second_guidance is {scale}; allowed is 1 for none, or more")
    unconditional = unconditional_condition(replace(config, teacher_guidance_scale=scale), backbone, rows)
    return lambda cond: backbone.guide_other(scale, unconditional(cond)) if unconditional else {}


def call(pipe, backbone, cond, state, steps: int, guided=lambda cond: {}) -> list:
    """One batch through the stock pipeline: (picture or frames in [0, 1], sound or None) of every sample."""
    decodes = getattr(pipe, "vae", None) is not None
    cond = {column: value.to(pipe.dtype) if value.is_floating_point() else value for column, value in cond.items()}
    result = pipe(
        **backbone.pipeline_condition(cond),
        **backbone.to_pipeline(state),
        **{**backbone.pipeline_arguments(), **guided(cond)},
        num_inference_steps=steps,
        output_type="pt" if decodes else "latent",
    )
    if decodes:
        pixels = result[0]
    else:
        latents = backbone.from_pipeline(result if len(backbone.modalities) > 1 else result[0])
        pixels = (backbone.to_images(latents) + 1) / 2
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
        rate = backbone.sound_rate(pipe) if sound is not None else 0
        write_video(stem / f"{slug}-{i}.mp4", frames, backbone.frame_rate, sound, rate)
        if sound is not None:
            write_sound(stem / f"{slug}-{i}.wav", sound, rate)
    return stem


def tile(pipe) -> None:
    try:
        pipe.vae.enable_tiling()
    except (AttributeError, NotImplementedError):
        print(
            f"--tiling changes nothing: {type(getattr(pipe, 'vae', None)).__name__} does not decode in tiles",
            flush=True,
        )


def show_progress(bar, pipe, steps: int | None) -> list:
    """Let the bar say which forward a batch is in, and then how often its decoder was called: once for each tile or frames."""
    counts = {"forward": 0, "decoder call": 0}

    def counted(name: str, total: str = ""):
        def hook(module, args) -> None:
            counts[name] = counts[name] % steps + 1 if total and steps else counts[name] + 1
            bar.set_postfix_str(f"{name} {counts[name]}{total}")

        return hook

    parts = [(pipe.transformer, counted("forward", f"/{steps}" if steps else ""))]
    for name in ("vae", "audio_vae"):
        if (decoder := getattr(getattr(pipe, name, None), "decoder", None)) is not None:
            parts.append((decoder, counted("decoder call")))
    return [module.register_forward_pre_hook(hook) for module, hook in parts]


def wanted_prompts(args) -> list[str]:
    """Prompts of the flags; empty when none was given.

    Raises:
        ConfigError: an unreadable file.
    """
    prompts = list(args.prompt or [])
    if args.prompts:
        try:
            prompts += [line.strip() for line in Path(args.prompts).read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts {args.prompts!r} cannot be read: {error}") from None
    return prompts


def encoded_prompts(prompts: list[str], run: Path, config: Config, student, rows, device: str) -> Path:
    """A dataset of all these prompts, as long and as precise as the run's own ``rows`` are, if there are any.

    Raises:
        ConfigError: the base model has no text encoders here, so that its dataset's prompts are all there are.
    """
    from encode_prompts import encoded
    from pdd.backbones import Backbone, read_json
    from pdd.data import ENCODING

    has_encoders = any(config.teacher_dir.glob("text_encoder*/config.json"))
    if not has_encoders or type(student.backbone).encode_prompts is Backbone.encode_prompts:
        if rows is None:
            raise ConfigError(
                f"base model {config.teacher!r} has no text encoders, and the student no data {config.data!r}"
            )
        missing = next(prompt for prompt in prompts if prompt not in rows.prompts)
        raise unknown(f"data {str(rows.path)!r}: prompt", missing, rows.prompts)
    known = rows is not None and (rows.path / ENCODING).exists()
    record = read_json(rows.path / ENCODING) if known else {}
    flags = ["--device", device, "--dtype", record.get("dtype", "fp32")]
    distinct, length = list(dict.fromkeys(prompts)), record.get("padding", {}).get("max_sequence_length")
    return encoded(run.parent, config.teacher, distinct, config.negative_prompt, length, *flags)


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
