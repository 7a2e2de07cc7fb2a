"""What one root forward a round is worth under ZeRO-3: the same rounds in one call of the engine and in a call per forward.

    python benchmarks/zero3_step.py                 # two CPU ranks, about two minutes; --json prints one JSON object
    python benchmarks/zero3_step.py --layers 12 --width 768

Every case has engines of its own in the same processes, and their steps take turns, so that what else the machine does
hits all of them alike; a step is loss, backward and update. Times are medians; the ratio is what to read.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CASES = {
    "LoRA": "adapters; the teacher is the student's own backbone",
    "full": "all weights; the teacher is an engine of its own",
    "full, rollout": "the same, with a forward of the student without gradient before each step",
}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_argument("--layers", type=int, default=6)
    flags.add_argument("--width", type=int, default=256, help="a multiple of 64")
    flags.add_argument("--steps", type=int, default=5, help="timed steps a case")
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--out", help=argparse.SUPPRESS)  # the ranks' own
    args = flags.parse_args()
    if args.out:
        return measure(args)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        place = {"WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        command = [sys.executable, __file__, *sys.argv[1:], "--out", f"{folder}/figures.json"]
        ranks = []
        for rank in range(args.ranks):
            own = {k: str(v) for k, v in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}
            environment = {**os.environ, "DS_ACCELERATOR": "cpu", **own}
            ranks.append(subprocess.Popen(command, env=environment, stdout=sys.stderr))
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")
        figures = json.loads(Path(folder, "figures.json").read_text())
    print(json.dumps(figures) if args.json else table(figures))


def measure(args: argparse.Namespace) -> None:
    """One rank: time the cases' steps in turn; rank 0 writes the figures."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    from pdd.engine import Processes

    resets, inner = [0], Coordinator._invalidate_trace

    def counted(self: Coordinator) -> None:
        resets[0] += 1
        inner(self)

    Coordinator._invalidate_trace = counted
    with Processes() as processes:
        runs = {(case, form): build(args, case, form == "one") for case in CASES for form in ("one", "separate")}
        seconds, counts = {key: [] for key in runs}, dict.fromkeys(runs, 0)
        for i in range(3 + args.steps):  # the first steps record the traces
            for key, step in runs.items():
                before, began = resets[0], time.perf_counter()
                step()
                if i >= 3:
                    seconds[key].append(time.perf_counter() - began)
                    counts[key] += resets[0] - before
        if processes.rank == 0:
            cases = {
                case: {
                    "one_root_forward_seconds": statistics.median(seconds[case, "one"]),
                    "separate_calls_seconds": statistics.median(seconds[case, "separate"]),
                    "ratio": statistics.median(b / a for a, b in zip(seconds[case, "one"], seconds[case, "separate"])),
                    "one_root_forward_resets_per_step": counts[case, "one"] / args.steps,
                    "separate_calls_resets_per_step": counts[case, "separate"] / args.steps,
                }
                for case in CASES
            }
            facts = {"layers": args.layers, "width": args.width, "ranks": processes.world, "steps": args.steps}
            Path(args.out).write_text(json.dumps({**facts, "parameters": parameters(args), "cases": cases}))


def parameters(args: argparse.Namespace) -> int:
    return sum(p.numel() for p in transformer(args).parameters())


def transformer(args: argparse.Namespace):
    import torch
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=args.layers, attention_head_dim=64,
        num_attention_heads=args.width // 64, joint_attention_dim=64, caption_projection_dim=args.width,
        pooled_projection_dim=64, pos_embed_max_size=8,
    )  # fmt: skip


def build(args: argparse.Namespace, case: str, one: bool) -> Callable[[], None]:
    """A training step of a case, with models and engines of its own."""
    import torch

    from pdd.backbones import backbone_for
    from pdd.config import Config
    from pdd.engine import Engine, SharedTeacher, fill_ds_config, freeze, read_ds_config
    from pdd.grid import Grid
    from pdd.lora import add_adapters
    from pdd.objective import pd_loss
    from pdd.student import Student, Velocity, head_parameters, widen
    from pdd.teacher import Teacher

    steps, lora = 8, case == "LoRA"
    config = Config(teacher="random", pdd_steps=steps, block_size_min=steps, block_size_max=steps, lora_rank=8 * lora)
    ds_config = fill_ds_config(read_ds_config("ds_configs/zero3.json"), config, int(os.environ["WORLD_SIZE"]), False)
    base = transformer(args)
    backbone = backbone_for({"transformer": {**base.config, "_class_name": type(base).__name__}})
    grid = Grid(steps, {"image": 3.0})
    student = widen(transformer(args), backbone, steps, keep_base=lora)
    if lora:
        add_adapters(student, backbone, "", config.lora_rank, config.alpha, 0)
    model = Velocity(student, backbone)
    teacher_model = SharedTeacher(model) if lora else freeze(Velocity(base, backbone), ds_config, torch.device("cpu"))
    engine = Engine(model, head_parameters(student), ds_config, 0.0, 0)
    if one:
        call, student_model = engine, model
    else:  # every forward is a call of its own
        call, student_model = lambda function: function(), partial(engine, model)
        teacher_model = partial(engine, teacher_model) if lora else teacher_model
    roles = Student(student_model, grid), Teacher(teacher_model, backbone, grid)
    g = torch.Generator().manual_seed(1)
    state = {"image": torch.randn(2, 4, 8, 8, generator=g)}
    cond = {
        "prompt_embeds": torch.randn(2, 7, 64, generator=g), "pooled_prompt_embeds": torch.randn(2, 64, generator=g),
    }  # fmt: skip
    n, k = torch.tensor([0, 2]), torch.tensor([[3], [6]])

    def loss():
        start = dict(state)
        if case == "full, rollout":
            start = roles[0].block(cond)(start, 0, 1)
        return pd_loss(*roles, start, n, k, cond, rule="euler")

    return lambda: engine.backward_and_step(call(loss).total)


def table(figures: dict) -> str:
    head = "{layers} layers of width {width}, {parameters:,} parameters, {ranks} ranks, medians of {steps} steps"
    lines = [head.format(**figures), "", f"{'':<14}{'one root':>10}{'separate':>10}{'ratio':>8}   trace resets a step"]
    for case, f in figures["cases"].items():
        lines.append(
            f"{case:<14}{f['one_root_forward_seconds']:>8.2f} s{f['separate_calls_seconds']:>8.2f} s{f['ratio']:>8.2f}   "
            f"{f['one_root_forward_resets_per_step']:.1f} and {f['separate_calls_resets_per_step']:.1f}"
        )
    return "\n".join([*lines, "", *(f"{case}: {what}" for case, what in CASES.items())])


if __name__ == "__main__":
    main()
