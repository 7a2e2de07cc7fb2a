"""A whole training step against the forwards, backward and update that no distillation can do without.

    python benchmarks/train_step.py                 # one CPU rank, about five minutes; --json prints one JSON object
    python benchmarks/train_step.py --layers 30 --width 1536 --tokens 32760 --batch 1 --compile       # Wan 1.3 B, on a GPU
    python benchmarks/train_step.py --ranks 2 --stages 3

A step of PDD is what train_pdd.py does for an update: draws, data, plans, the student's forward, the teacher's at the state that
was reached, loss, backward, optimizer, figures for the log. The *plain* step has the same forward of the un-widened model with
backward, the same teacher forward and the same optimizer, in an engine of the same kind, and nothing else. Both take turns
in one process. The teacher is asked once, without guidance: whatever else a step does is largest beside that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from common import Training, accelerated, device, flops, inputs, matrix_rate, median_ratio, on_ranks, parser, show, turns

REGIMES = ("simulate", "data_latent")


def main() -> None:
    flags = parser(__doc__, layers=4, width=512, tokens=256, batch=1, repeats=7, ranks=1)
    flags.add_argument("--stages", type=int, nargs="+", default=[0, 3], help="of ZeRO (default 0 3)")
    flags.add_argument("--compile", action="store_true", help="compile the transformers' blocks")
    flags.add_argument("--case", nargs=2, type=int, metavar=("STAGE", "LORA"), help=argparse.SUPPRESS)
    flags.add_argument("--out", help=argparse.SUPPRESS)
    args, argv = flags.parse_args(), sys.argv[1:]
    if args.out:
        return measure(args)
    cases = [
        on_ranks(__file__, args.ranks, [*argv, "--case", str(stage), str(int(lora))], args.threads)
        for stage in args.stages
        for lora in (False, True)
    ]
    if args.json:
        return print(json.dumps({**vars(args), "cases": cases}))
    rows = [
        [f"ZeRO-{c['stage']}, {'adapters' if c['lora'] else 'full'}", f"{c['parameters']:,}", c["plain_seconds"]]
        + [c[f"{regime}_over_plain"] for regime in REGIMES]
        + ([c["flops_per_second"] / 1e12, c["matrix_rate"] / 1e12] if accelerated() else [])
        for c in cases
    ]
    columns = ["", "parameters", "plain step, s", *(f"{regime} / plain" for regime in REGIMES)]
    columns += ["TFLOP/s", "of a matrix product"] if accelerated() else []
    title = f"{args.layers} layers of width {args.width}, {args.batch} x {args.tokens} tokens, {args.ranks} ranks, "
    show(title + f"medians of {args.repeats}", columns, rows)


def measure(args: argparse.Namespace) -> None:
    """One rank of one case; rank 0 writes the figures."""
    from pdd.engine import Processes

    stage, lora = args.case
    with Processes() as processes:
        plain, pdd = (Training(args, stage, bool(lora), steps) for steps in (0, 32))
        cases = {"plain": plain_step(plain)} | {regime: pdd.step(regime) for regime in REGIMES}
        seconds = turns(cases, args.repeats, warm=3)  # the first steps make optimizer states, and ZeRO-3's traces
        counted = flops(cases["simulate"]) if accelerated() else 0
        if processes.rank:
            return
        facts = {"stage": stage, "lora": bool(lora), "parameters": plain.parameters}
        facts |= {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}
        facts |= {f"{regime}_over_plain": median_ratio(seconds[regime], seconds["plain"]) for regime in REGIMES}
        if accelerated():
            facts |= {"flops_per_second": counted / facts["simulate_seconds"], "matrix_rate": matrix_rate(*device(1))}
        Path(args.out).write_text(json.dumps(facts))


def plain_step(parts: Training) -> Callable[[], None]:
    """Student forward, teacher forward, their distance, backward, update."""
    import torch

    state, cond = inputs(parts.args.tokens, parts.args.batch, parts.device)
    sigma = {"video": torch.full((parts.args.batch,), 0.5, device=parts.device)}

    def loss():
        prediction = parts.model(state, sigma, cond)["video"]
        with torch.no_grad():
            target = parts.teacher_model(state, sigma, cond)["video"]
        return (prediction - target).square().mean()

    return lambda: parts.engine.backward_and_step(parts.engine(loss))


if __name__ == "__main__":
    main()
