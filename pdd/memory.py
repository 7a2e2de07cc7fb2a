"""What a run would need, without its weights: parameters, model states and activations per rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pdd.backbones import Backbone
from pdd.config import Config
from pdd.data import Rows
from pdd.engine import lowers_precision, model_dtype, zero_stage
from pdd.float32 import kept_in_float32
from pdd.formats import empty_transformer
from pdd.grid import Grid
from pdd.high_noise import HighNoiseRollout
from pdd.lora import add_adapters
from pdd.student import Student, Velocity, head_parameters, widen


def estimate(
    config: Config,
    ds_config: dict[str, Any],
    backbone: Backbone,
    grid: Grid,
    rows: Rows,
    ranks: int,
    rollout: HighNoiseRollout | None = None,
) -> dict[str, int]:
    """Bytes per rank, and counts of parameters.

    Model states follow from the ZeRO stage: weights and gradients in the model's dtype, float32 masters, Adam's two
    averages and the weight average; and whole float32 copies of what Diffusers keeps so, where the engine computes in less.
    With adapters the student adds to the teacher's weights only what is trained.
    Activations are what autograd saves in one student forward, found by running it on meta tensors, or left out where the
    family cannot; with gradient checkpointing, the recomputation of one block comes on top. Not counted: buffers of
    collectives, fragmentation, the teacher's transient activations.
    """
    stage = zero_stage(ds_config)
    dtype = model_dtype(ds_config)
    half, size = dtype == torch.bfloat16, dtype.itemsize
    transformer = empty_transformer(backbone.config)
    kept = {name for name, *_ in kept_in_float32(transformer)}
    for name, parameter in transformer.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)
    base, copies = count(transformer), 0 if config.lora_rank else count_kept(transformer)
    transformer = widen(transformer, backbone, config.pdd_steps, keep_base=bool(config.lora_rank)).to("meta")
    if config.lora_rank:
        add_adapters(transformer, backbone, config.lora_targets, config.lora_rank, config.alpha, config.seed)
    heads = sum(p.numel() for p in head_parameters(transformer))
    trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    copies += count_kept(transformer)
    high = rollout and rollout.empty()
    copies += count_kept(high) if high else 0

    def share(sharded: bool) -> int:
        return ranks if sharded else 1

    # float32 weights without ZeRO are their own masters
    masters = 4 * (2 + (half or stage > 0) + (config.ema_decay > 0))
    out = {
        "parameters": base,
        "head_parameters": heads,
        "trained_parameters": trained,
        "weights": size * trained // share(stage == 3),
        "gradients": size * trained // share(stage >= 2),
        "optimizer": masters * trained // share(stage >= 1),
        "teacher": size * base // share(stage == 3),
        "high expert": size * count(high) // share(stage == 3) if high else 0,
        "float32": 4 * copies * lowers_precision(ds_config),
    }
    if backbone.runs_on_meta:
        out["activations"] = activations(config, transformer, backbone, grid, rows)
    return out | {"total": sum(size for name, size in out.items() if not name.endswith("parameters"))}


def count(model: nn.Module) -> int:
    """Its parameters."""
    return sum(p.numel() for p in model.parameters())


def count_kept(model: nn.Module) -> int:
    """Those of them that Diffusers keeps in float32."""
    return sum(module.get_parameter(own).numel() for _, module, own, _ in kept_in_float32(model))


def activations(config: Config, transformer: nn.Module, backbone: Backbone, grid: Grid, rows: Rows) -> int:
    """Bytes that autograd saves in one student forward of a micro-batch, parameters left out."""
    batch = config.train_micro_batch_size_per_gpu
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if not config.lora_rank:
        transformer.train()
    state = {m: torch.empty(batch, *shape, device="meta") for m, shape in rows.latent_shapes.items()}
    cond = rows.cond(torch.tensor(rows.trained[:1]), "cpu")
    cond = {c: v.expand(batch, *v.shape[1:]) for c, v in cond.items()}
    # masks stay real: families read lengths from them
    cond = {c: v.to("meta") if v.is_floating_point() else v for c, v in cond.items()}
    n, end = config.starts[0], config.starts[1] if len(config.starts) > 1 else config.pdd_steps
    heads = list(range(n, n + config.num_targets))
    plans = grid.plan([n] * batch, [[*heads, end]] * batch, [heads] * batch)
    parameters = {t.untyped_storage()._cdata for t in transformer.parameters()}
    saved: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = (storage, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = Student(Velocity(transformer, backbone), grid).directions(state, torch.tensor([n] * batch), cond, plans)
        sum(v.sum() for v in out.values())
    return sum(size for _, size in saved.values())


def report(figures: dict[str, int], ranks: int) -> str:
    """The estimate as text."""
    counts = (
        f"{figures['parameters']:,} parameters and {figures['head_parameters']:,} in the heads, "
        f"{figures['trained_parameters']:,} trained; per rank of {ranks}:"
    )
    names = ["weights", "gradients", "optimizer", "teacher", "high expert", "float32", "activations", "total"]
    names = [name for name in names if figures.get(name) != 0]
    sizes = (readable(figures[name]) if name in figures else "not counted" for name in names)
    return "\n".join([counts, *(f"{name:>12} {size:>12}" for name, size in zip(names, sizes))])


def readable(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if size >= 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size / 2**10:.2f} KiB"
