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
from collections.abc import Callable

from common import Training, accelerated, device, flops, inputs, matrix_rate, on_ranks, parser, show, turns

REGIMES = ("simulate", "data_latent")


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, layers=6, width=768, tokens=256, batch=1, rounds=7, ranks=1)
    flags.add_argument("--stages", type=int, nargs="+", default=[0, 3], help="of ZeRO (default 0 3)")
    flags.add_argument("--compile", action="store_true", help="compile the transformers' blocks")
    args = flags.parse_args(argv)
    cases = [on_ranks(measure, args.ranks, args, stage, lora) for stage in args.stages for lora in (False, True)]
    if args.json:
        return print(json.dumps({**vars(args), "cases": cases}))
    rows = [
        [f"ZeRO-{c['stage']}, {'adapters' if c['lora'] else 'full'}", f"{c['parameters']:,}", c["plain_seconds"]]
        + [c[f"{regime}_over_plain"] for regime in REGIMES]
        + ([c["flops_per_second"] / 1e12, c["matrix_rate"] / 1e12] if "matrix_rate" in c else [])
        for c in cases
    ]
    columns = ["", "parameters", "plain step, s", *(f"{regime} / plain" for regime in REGIMES)]
    columns += ["TFLOP/s", "of a matrix product"] if "matrix_rate" in cases[0] else []
    title = f"{args.layers} layers of width {args.width}, {args.batch} x {args.tokens} tokens, {args.ranks} ranks, "
    show(title + f"least of {args.rounds} turns", columns, rows)


def measure(args: argparse.Namespace, stage: int, lora: bool) -> dict:
    """One rank of one case."""
    from pdd.engine import Processes

    with Processes():
        plain, pdd = (Training(args, stage, lora, steps) for steps in (0, 32))
        cases = {"plain": plain_step(plain)} | {regime: pdd.step(regime) for regime in REGIMES}
        seconds = turns(cases, args.rounds, warm=3)  # optimizer states, and ZeRO-3's traces
        facts = {"stage": stage, "lora": lora, "parameters": plain.parameters}
        facts |= {f"{name}_seconds": value for name, value in seconds.items()}
        facts |= {f"{regime}_over_plain": seconds[regime] / seconds["plain"] for regime in REGIMES}
        if accelerated():
            facts["flops_per_second"] = flops(cases["simulate"]) / facts["simulate_seconds"]
            facts["matrix_rate"] = matrix_rate(*device(1))
        return facts


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
