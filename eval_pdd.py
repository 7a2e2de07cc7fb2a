"""Evaluate a student against its teacher: report.html and metrics.json.

    python eval_pdd.py --steps 1 2 4 8                                  # the newest complete run under runs/
    python eval_pdd.py --steps 2 4 --run runs/mine --calibrate 2 4      # find, and store, better block boundaries
    torchrun --nproc_per_node 8 -- eval_pdd.py --steps 4 8 --run runs/mine --features package.module.extract

Every method starts from the same noise, which nothing but the seed decides: the same figures every time, on any number of
processes (torchrun needs the ``--``, or it takes --run for its own). Plain torch: no DeepSpeed. Prompts are looked up in the
run's conditioning dataset.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pdd.config import ROOT, Config, ConfigError, Parser, status_of, unknown


def parser() -> Parser:
    flags = Parser(description=__doc__)
    flags.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8], metavar="K", help="forwards per sample")
    flags.add_argument("--run", help="run folder; the newest complete one under runs/ if not given")
    flags.add_argument("--student", help="a student folder outside a run, with transformer/ and pdd_config.json")
    flags.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    flags.add_argument("--prompts", help="text file of prompts, one a line")
    flags.add_argument("--num", type=int, default=500, help="samples per prompt (default 500)")
    flags.add_argument("--trajectories", type=int, default=64, help="samples measured along their way (default 64)")
    flags.add_argument("--seed", type=int, default=0, help="seed of the noise (default 0)")
    flags.add_argument("--batch", type=int, default=100, help="samples per forward (default 100)")
    flags.add_argument("--calibrate", type=int, nargs="+", metavar="K",
                       help="choose the boundaries of so many blocks and store them in the student's contract")  # fmt: skip
    flags.add_argument("--tol", type=float, nargs="*", default=[0.08, 0.12, 0.2, 0.3, 0.4], metavar="T",
                       help="tolerances of adaptive sampling to try (default 0.08 0.12 0.2 0.3 0.4)")  # fmt: skip
    flags.add_argument("--features", help="dotted name of a function, pictures [B, C, H, W] in [-1, 1] -> features [B, F];"
                       " the teacher folder's own classifier if not given")  # fmt: skip
    flags.add_argument("--out", help="folder of the report; the run folder if not given")
    flags.add_argument("--device", help="torch device; the first accelerator, else the CPU")
    flags.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="weights' precision; as stored if not given")
    flags.add_argument("--force", action="store_true", help="sample blocks wider than trained, too")
    flags.add_argument("--readme", action="store_true", help="also renew the README's table and its picture")
    return flags


def main(argv: list[str]) -> int:
    def action() -> None:
        evaluate(parser().parse_args(argv))
        leave_ranks()

    return status_of("eval_pdd.py", action)


def leave_ranks() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()  # rank 0 still writes while the others are done
        dist.destroy_process_group()


def evaluate(args) -> None:
    import torch

    from pdd import run as runs
    from pdd.data import Rows
    from pdd.evaluate import Baselines, Space, evaluation_prompts, join_ranks
    from pdd.formats import CALIBRATED, CONTRACT, PRECISIONS, find_student, read_contract, read_student, student_config
    from pdd.report import update_readme, write_report
    from sample_pdd import wanted_prompts

    folder = find_student(args.run, args.student)
    out = Path(args.out) if args.out else folder if args.student else folder.parent
    for name in ("num", "batch", "trajectories"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} is {getattr(args, name)}; allowed is 1 or more")
    for tolerance in args.tol:
        if not tolerance >= 0:
            raise ConfigError(f"tol is {tolerance}; allowed is 0 or more")
    if args.readme and not {1, 2, 4} <= set(args.steps):
        raise ConfigError(f"steps is {args.steps}; with --readme allowed are those that have 1, 2 and 4")
    first = join_ranks() == 0
    device = args.device or runs.own_device()
    dtype = PRECISIONS.get(args.dtype)
    try:
        student = read_student(folder, dtype, device)
        for steps in (*args.steps, *(args.calibrate or [])):
            student.nodes(steps, args.force, calibrated=False)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if student.backbone.expert is not None:
        raise ConfigError(
            f"student {str(folder)!r} is of the {student.backbone.expert} expert; allowed is one of the whole clock"
        )
    config = student_config(folder)
    rows = Rows(config, student.backbone)
    prompts = wanted_prompts(args)
    for prompt in prompts:
        if prompt not in rows.prompts:
            raise unknown(f"data {str(rows.path)!r}: prompt", prompt, rows.prompts)
    prompts = prompts or evaluation_prompts(config, rows)
    space = Space(config, args.features)
    if first:
        print(f"student {folder}", flush=True)

    baselines = Baselines(config, rows, student.grid, device, dtype or torch.float32)
    if args.calibrate:
        found = find_partitions(args, student, baselines, rows, prompts, device)
        student.facts[CALIBRATED] = {**(student.facts.get(CALIBRATED) or {}), **found}
        if first:
            # read again, as the file may have other entries by now; written whole or not at all
            facts = read_contract(folder)
            facts[CALIBRATED] = {**(facts.get(CALIBRATED) or {}), **found}
            runs.write_json(folder / CONTRACT, facts)
    metrics, pictures = measure(args, config, student, baselines, rows, prompts, space, device, show=first)
    if not first:
        return
    out.mkdir(parents=True, exist_ok=True)
    runs.write_json(out / "metrics.json", metrics)
    write_report(out / "report.html", metrics, pictures)
    print(summary(metrics))
    print(f"report  {out / 'report.html'}\nmetrics {out / 'metrics.json'}")
    if args.readme:
        update_readme(ROOT, metrics, pictures)


CANDIDATES = 32  # nodes at which the blocks of a calibrated partition may begin
CHUNK = 16  # calibration and trajectory samples per forward


def find_partitions(args, student, baselines, rows, prompts, device) -> dict[str, list[int]]:
    """Calibrated partitions, from noise that no figure of the report is measured on."""
    from pdd.evaluate import Bench, Trajectories, calibrate
    from pdd.grid import partition
    from pdd.student import FusedStudent

    counts = list(dict.fromkeys(args.calibrate))
    given = {steps: student.nodes(steps, args.force, calibrated=False) for steps in counts}
    number = min(student.grid.pdd_steps, max(CANDIDATES, 2 * max(counts)))
    candidates = partition(student.grid.pdd_steps, number)
    kept = sorted({*candidates, *(node for nodes in given.values() for node in nodes)})
    each = -(-args.trajectories // len(prompts))
    bench = Bench(rows, prompts, each, (args.seed, "calibration"), CHUNK, device)
    trajectories = Trajectories(bench, baselines.fine(), kept)
    widest = student.grid.pdd_steps if args.force else student.facts["block_size_max"]
    whole = FusedStudent(student.transformer, student.backbone, student.grid).unfused()
    found = calibrate(trajectories, whole, counts, widest, given)
    return {str(steps): entry["nodes"] for steps, entry in found.items()}


def measure(args, config, student, baselines, rows, prompts, space, device, show):
    """All figures, and the pictures of every method."""
    from tqdm import tqdm

    from pdd.evaluate import Bench, Endpoints, best, by_blocks, by_tolerance
    from pdd.report import Pictures
    from pdd.solvers import SOLVERS
    from pdd.student import FusedStudent

    grid, facts, steps = student.grid, student.facts, list(dict.fromkeys(args.steps))
    fused = FusedStudent(student.transformer, student.backbone, grid)
    # balanced (or as configured in training), and calibrated where the contract has that
    partitions = {("student", k): student.nodes(k, args.force, calibrated=False) for k in steps}
    stored = {int(k) for k in facts.get("calibrated_grid_indices") or {}}
    partitions |= {("calibrated", k): student.nodes(k, args.force) for k in steps if k in stored}
    widest = grid.pdd_steps if args.force else facts["block_size_max"]

    jobs = {key: [by_blocks(fused, grid, nodes)] for key, nodes in partitions.items()}
    jobs |= {(name, k): baselines.solver(name, k) for k in steps for name in SOLVERS}
    jobs |= {("adaptive", t): [by_tolerance(fused, t, student.starts, widest)] for t in args.tol}
    bar = tqdm(total=len(jobs) + 2, desc="evaluate", unit="method", leave=False, disable=not show)

    bench = Bench(rows, prompts, args.num, (args.seed, "evaluation"), args.batch, device)
    pixels, sound_rate = decoder(student, config, device)
    endpoints = Endpoints(bench, baselines.fine(), pixels, space, Pictures.SHOWN)
    bar.update()
    pictures = Pictures(prompts, endpoints.teacher.shown, student.backbone.frame_rate, sound_rate)
    results, seconds = {}, {"teacher": endpoints.teacher.seconds}
    for (name, k), methods in jobs.items():
        several = [endpoints(method) for method in methods]
        if several:
            results[name, k] = best(several, endpoints.teacher)
            nearest = min(several, key=lambda m: m.figures["endpoint_error"])
            pictures.add(name, k, nearest.shown)
            seconds[f"{name} {k}"] = nearest.seconds
        bar.update()

    ways = measure_ways(args, student, fused, baselines, rows, prompts, partitions, widest, device)
    bar.update()
    bar.close()

    table = {}
    for k in steps:
        table[str(k)] = {name: dict(f) for (name, j), f in results.items() if j == k and name != "adaptive"}
        for name in ("student", "calibrated"):
            if name in table[str(k)]:
                table[str(k)][name]["nodes"] = partitions[name, k]
    fine = {key: value for key, value in endpoints.teacher.figures.items() if key != "endpoint_error"}
    return {
        "student": {"trained_steps": facts["trained_steps"], "pdd_steps": grid.pdd_steps, "block_size_max": widest,
                    "shift": facts["shift"], "starts": student.starts[:-1], "teacher": facts["base_model"],
                    "guidance": facts["teacher_guidance_scale"]},
        "prompts": prompts,
        "samples_per_prompt": args.num,
        "seed": args.seed,
        "reference": "real" if all(p in endpoints.space.real for p in prompts) else "teacher",
        "teacher": fine,
        "steps": table,
        "adaptive": [{"tol": t, **results["adaptive", t]} for t in args.tol],
        **ways,
        "seconds_per_sample": seconds,
    }, pictures  # fmt: skip


def measure_ways(args, student, fused, baselines, rows, prompts, partitions, widest, device):
    """What is measured along trajectories, on few samples of their own noise."""
    from pdd.evaluate import Bench, Trajectories, by_blocks
    from pdd.report import paths

    grid = student.grid
    each = -(-args.trajectories // len(prompts))
    bench = Bench(rows, prompts, each, (args.seed, "trajectories"), CHUNK, device)
    steps = [k for name, k in partitions if name == "student"]
    # Euler on the student's own schedule, where its nodes are nodes of the fine grid
    strides = {k: grid.pdd_steps // k for k in steps if grid.pdd_steps % k == 0}
    euler = {k: baselines.solver("euler", k)[0] for k in strides}
    kept = {node for nodes in partitions.values() for node in nodes} | set(student.starts)
    kept.update(node for stride in strides.values() for node in range(0, grid.pdd_steps, stride))
    if grid.pdd_steps <= 64:  # a smooth line in the picture; every state is kept, so a finer grid has fewer
        kept.update(range(grid.pdd_steps))
    trajectories = Trajectories(bench, baselines.fine(), kept)

    along = {"student": {}, "calibrated": {}}
    for (name, k), nodes in partitions.items():
        along[name][str(k)] = trajectories.along(by_blocks(fused, grid, nodes))
    along["euler"] = {str(k): trajectories.along(method, strides[k]) for k, method in euler.items()}
    shown = 4 if 4 in steps else steps[len(steps) // 2]
    drawn = paths(trajectories, by_blocks(fused, grid, partitions["student", shown]), euler.get(shown), shown)
    teacher, rule = baselines.teacher(grid), student.facts["type_rk"]
    heads = trajectories.heads(fused.unfused(), teacher, student.starts[:-1], widest, rule)
    return {"trajectory_samples": each * len(prompts), "along": along, "heads": heads, "paths": drawn}


def decoder(student, config: Config, device):
    """``(state, cond) -> (pictures in [-1, 1], sounds)`` by the stock pipeline's decoder, or straight from latents where
    there is none; and the sounds' rate."""
    import torch

    from pdd.pipeline import load_student
    from sample_pdd import call

    if not (config.teacher_dir / "vae").is_dir():
        return lambda state, cond: (
            student.backbone.to_images(state).cpu(),
            [None] * len(next(iter(state.values()))),
        ), 0
    try:
        pipe = load_student(student, config.teacher_dir, text_encoders=False, device=device, finished=True)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    pipe.set_progress_bar_config(disable=True)

    def pixels(state, cond):
        made = call(pipe, student.backbone, cond, {m: x.to(pipe.dtype) for m, x in state.items()}, 1)
        return torch.stack([picture for picture, _ in made]) * 2 - 1, [sound for _, sound in made]

    return pixels, student.backbone.sound_rate(pipe) if "audio" in student.backbone.modalities else 0


def summary(metrics: dict) -> str:
    """The endpoint errors as text."""
    from pdd.report import NAMES

    names = [n for n in NAMES if any(n in row for row in metrics["steps"].values())]
    lines = ["endpoint error", "forwards" + "".join(f"{NAMES[n]:>14}" for n in names)]
    for k, row in metrics["steps"].items():
        cells = (f"{row[n]['endpoint_error']:14.3f}" if n in row else f"{'-':>14}" for n in names)
        lines.append(f"{k:>8}" + "".join(cells))
    for row in metrics["adaptive"]:
        lines.append(f"adaptive, tol {row['tol']:g}: {row['endpoint_error']:.3f} in {row['forwards']:.2f} forwards")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
