"""Memory of a rank under ZeRO-3, and what is gathered in a step, on 1, 2 and 4 ranks.

    python benchmarks/zero3_memory.py               # CPU ranks, minutes; --json prints one JSON object
    python benchmarks/zero3_memory.py --layers 30 --width 1536 --tokens 4096 --ranks 1 2 4 8          # on that many GPUs

Training is as train_pdd.py sets it up, a frozen teacher beside the student. *States* are all tensors that a rank holds between
two steps: shards of weights, masters and Adam's averages, the teacher's shard, buffers, what ZeRO-3 never shards. *Peak* is the
most that it holds in a step: gathered weights, activations and gradients are there, too. What ZeRO-3 keeps gathered, and its
buffers, are made as small beside this model as their defaults are beside a large one.

A gather of a parameter is *needed* once for each forward that it takes part in, and once for the student's backward; more are
*extra*. PEFT looks at the dtype of an adapter's down matrix from outside of its module, which makes ZeRO-3 gather those that
are not too small to be sharded with the linear that they adapt, in the teacher's forward, too.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Callable

from common import Training, accelerated, allocated, on_ranks, parser, show

MODES = ("full", "adapters")


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, layers=6, width=512, tokens=64, batch=1)
    flags.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="default 1 2 4")
    flags.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="default: both")
    args = flags.parse_args(argv)
    cases = [
        {"mode": mode, "ranks": ranks, **on_ranks(measure, ranks, args, mode)}
        for mode in args.modes
        for ranks in args.ranks
    ]
    for case in cases:
        alone = next(c for c in cases if c["mode"] == case["mode"])
        case["states_of_first"], case["peak_of_first"] = (case[k] / alone[k] for k in ("states_bytes", "peak_bytes"))
    if args.json:
        return print(json.dumps({**vars(args), "cases": cases}))
    rows = [
        [f"{c['mode']}, {c['ranks']} rank{'s' * (c['ranks'] > 1)}", c["states_bytes"] / 2**20, c["states_of_first"],
         c["peak_bytes"] / 2**20, c["peak_of_first"], c["gathers"], c["needed"], c["extra"],
         f"{c['extra_elements']:.2%}"]
        for c in cases
    ]  # fmt: skip
    columns = ["", "states, MiB", "ratio", "peak, MiB", "ratio", "gathers a step", "needed", "extra", "of elements"]
    title = f"{cases[0]['parameters']:,} parameters, {args.layers} layers of width {args.width}, "
    show(title + f"{args.batch} x {args.tokens} tokens a rank", columns, rows)


def measure(args: argparse.Namespace, mode: str) -> dict:
    """One rank."""
    from pdd.engine import Processes

    block, lora = 20 * args.width**2, mode == "adapters"  # about the parameters of a block
    zero = {
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": block,
        "reduce_bucket_size": block // 10,
    }
    zero |= {"stage3_prefetch_bucket_size": block // 2, "stage3_param_persistence_threshold": 65 * args.width}
    with Processes():
        training = Training(args, 3, lora, zero=zero)
        step = training.step("simulate")
        for _ in range(3):
            step()
        counts = gathers(step)
        uses = {p: need(name, lora) for name, p in training.model.named_parameters()}
        uses |= {p: 1 for p in ([] if lora else training.teacher_model.module.parameters())}
        needed, sizes = ({p.ds_id: v for p, v in d.items()} for d in (uses, {p: p.ds_numel for p in uses}))
        extra = {p: count - needed[p] for p, count in counts.items() if count > needed[p]}
        states = held()
        return {
            "parameters": training.parameters, "states_bytes": states, "peak_bytes": states + allocated(step)[0],
            "gathers": sum(counts.values()), "needed": sum(needed[p.ds_id] for p in uses if not p.ds_persist),
            "extra": sum(extra.values()),
            "extra_elements": sum(count * sizes[p] for p, count in extra.items()) / sum(n * sizes[p] for p, n in needed.items()),
        }  # fmt: skip


def need(name: str, lora: bool) -> int:
    """Forwards and backwards of a step that a parameter of the student takes part in."""
    if not lora or ".lora_" in name or ".bank." in name:
        return 2
    return 1 if ".base." in name else 3  # a frozen linear is in the teacher's forward, too


def gathers(step: Callable[[], None]) -> Counter:
    """How often a step gathers each parameter, by ZeRO-3's number for it."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    name, counts = "_PartitionedParameterCoordinator__all_gather_params_", Counter()
    gather = getattr(Coordinator, name)

    def counted(self, params, *args, **kwargs):
        counts.update(p.ds_id for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE)
        return gather(self, params, *args, **kwargs)

    setattr(Coordinator, name, counted)
    try:
        step()
    finally:
        setattr(Coordinator, name, gather)
    return counts


def held() -> int:
    """Bytes of all tensors there are."""
    import torch

    gc.collect()
    if accelerated():
        return torch.cuda.memory_allocated()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    main()
