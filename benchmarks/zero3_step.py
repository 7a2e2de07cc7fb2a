"""What one root forward a round is worth under ZeRO-3: the same rounds in one call of the engine and in a call per forward.

    python benchmarks/zero3_step.py                 # two CPU ranks, about two minutes; --json prints one JSON object
    python benchmarks/zero3_step.py --layers 12 --width 768

Every case has engines of its own in the same processes, and their steps take turns, so that what else the machine does
hits all of them alike; a step is loss, backward and update. Times are the least that passed; the ratio is what to read.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from functools import partial

from common import Training, inputs, on_ranks, parser, show, turns

CASES = {
    "LoRA": "adapters; the teacher is the student's own backbone",
    "full": "all weights; the teacher is an engine of its own",
    "full, rollout": "the same, with a forward of the student without gradient before each step",
}


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, layers=6, width=256, tokens=16, batch=2, rounds=5, ranks=2)
    args = flags.parse_args(argv)
    figures = {**vars(args), **on_ranks(measure, args.ranks, args)}
    if args.json:
        return print(json.dumps(figures))
    rows = [
        [case, f["one_root_forward_seconds"], f["separate_calls_seconds"], f["ratio"], f["one_root_forward_resets_per_step"],
         f["separate_calls_resets_per_step"]]
        for case, f in figures["cases"].items()
    ]  # fmt: skip
    title = f"{figures['parameters']:,} parameters, {args.layers} layers of width {args.width}, {args.ranks} ranks, "
    columns = ["", "one root, s", "separate, s", "ratio", "trace resets a step", "separate"]
    show(title + f"least of {args.rounds} turns", columns, rows)
    print("\n" + "\n".join(f"{case}: {what}" for case, what in CASES.items()))


def measure(args: argparse.Namespace) -> dict:
    """One rank: time the cases' steps in turn."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    from pdd.engine import Processes

    resets, inner = Counter(), Coordinator._invalidate_trace

    def counted(self: Coordinator) -> None:
        resets[running] += 1
        inner(self)

    Coordinator._invalidate_trace = counted
    with Processes():
        runs = {(case, form): Training(args, 3, case == "LoRA", 8) for case in CASES for form in ("one", "separate")}
        parameters = next(iter(runs.values())).parameters
        steps = {key: rounds(training, key[0], key[1] == "one") for key, training in runs.items()}

        def noted(key: tuple[str, str]) -> None:
            nonlocal running
            running = key
            steps[key]()

        running = ""
        turns(calls := {key: partial(noted, key) for key in runs}, 0, 3)  # the first steps record the traces
        resets.clear()
        seconds = turns(calls, args.rounds, 0, wall=True)
        cases = {
            case: {
                "one_root_forward_seconds": seconds[case, "one"],
                "separate_calls_seconds": seconds[case, "separate"],
                "ratio": seconds[case, "separate"] / seconds[case, "one"],
                "one_root_forward_resets_per_step": resets[case, "one"] / args.rounds,
                "separate_calls_resets_per_step": resets[case, "separate"] / args.rounds,
            }
            for case in CASES
        }
        return {"parameters": parameters, "cases": cases}


def rounds(training: Training, case: str, one: bool) -> Callable[[], None]:
    """A training step of a case."""
    import torch

    from pdd.objective import pd_loss

    engine, call = training.engine, training.engine
    student, teacher = training.roles()
    if not one:  # every forward is a call of its own
        call, student.model = lambda function: function(), partial(engine, training.model)
        if case == "LoRA":
            teacher.model = partial(engine, training.teacher_model)
    state, cond = inputs(training.args.tokens, training.args.batch, training.device)
    n = torch.arange(training.args.batch) % 4
    k = n[:, None] + 3

    def loss():
        start = dict(state)
        if case == "full, rollout":
            start = student.block(cond)(start, 0, 1)
        return pd_loss(student, teacher, start, n, k, cond, rule="euler")

    return lambda: engine.backward_and_step(call(loss).total)


if __name__ == "__main__":
    main()
