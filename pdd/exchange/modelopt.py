"""NVIDIA Model-Optimizer: the widened transformer as an ordinary Diffusers folder, ``out_channels`` times N.

A family whose transformer passes tokens through has a head-major bank ``[N * out, in]``. One that unpatchifies inside must have
each patch position's rows of all heads together, or its stock class would mix channels; such a bank is patch-major, and the file
says so. ``pdd_metadata.json`` has the names of the earlier format. Its grid starts at noise level 1 and is cut at 0.999.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdd.backbones import Backbone, read_json
from pdd.exchange.base import (
    HEAD_MAJOR,
    LAYOUT,
    OURS,
    PATCH_MAJOR,
    Options,
    Portable,
    banks,
    base_backbone,
    base_of,
    checked,
    clamped,
    foreign,
    head_shapes,
    integer,
    metadata,
    number,
    read_component,
    require_grid,
    shifts_of,
    split_banks,
    step_counts,
    wanted_shifts,
    wanted_steps,
    write_component,
)
from pdd.exchange.fastvideo import require_base
from pdd.formats import empty_transformer
from pdd.run import write_json

SUMMARY = "the widened transformer as an ordinary Diffusers folder, its channels times N"
CHANNELS = {"audio": "audio_out_channels"}  # of modalities other than the first
SIDECAR, LARGEST = "pdd_metadata.json", 0.999


def widened_config(backbone: Backbone, steps: int) -> dict[str, Any]:
    """What the base transformer's configuration changes to.

    Raises:
        ValueError: the family has no such entry.
    """
    changed = {}
    for i, m in enumerate(backbone.heads):
        name = "out_channels" if i == 0 else CHANNELS.get(m, "")
        channels = backbone.config.get(name) or backbone.config.get("in_channels" if i == 0 else "")
        changed[name] = (channels or 0) * steps
    if set(changed) - set(backbone.config):
        raise ValueError(
            f"{backbone.config['_class_name']} has no out_channels to be widened; modelopt cannot hold its students"
        )
    transformer = empty_transformer({**backbone.config, **changed})
    for name, (n, out, *_) in head_shapes(backbone, steps).items():
        if transformer.get_parameter(name).shape[0] != n * out:
            raise ValueError(
                f"{backbone.config['_class_name']} does not widen {name} by out_channels; modelopt cannot hold it"
            )
    return changed


def layout_of(backbone: Backbone) -> str:
    return HEAD_MAJOR if all(head.patch == 1 for head in backbone.heads.values()) else PATCH_MAJOR


def write(student: Portable, folder: Path, options: Options) -> None:
    """
    Raises:
        ValueError: a family that cannot be widened so, or another grid.
    """
    backbone, facts = student.backbone, student.facts
    changed = widened_config(backbone, facts["pdd_steps"])
    shifts = facts["shift"] if facts.get("sigmas") else shifts_of(student)
    grid = clamped(facts["pdd_steps"], shifts, LARGEST)
    require_grid(student, grid, options, "modelopt", f"1 at the start, cut at {LARGEST}")
    _, nodes = wanted_steps(student, options)
    name, revision = base_of(student, options)
    layout = layout_of(backbone)
    own = {
        "schema_version": 1,
        "grid_size": facts["pdd_steps"],
        "grid_max_t": LARGEST if facts.get("sigmas") else facts["grid_max_t"],
        "flow_shift": next(iter(shifts.values())) if len(set(shifts.values())) == 1 else shifts,
        "block_size_min": facts["block_size_min"],
        "block_size_max": facts["block_size_max"],
        "inference_blocks": [b - a for a, b in zip(nodes, nodes[1:])],
        "teacher_integrator": facts["type_rk"],
        "layer_spec": {LAYOUT: layout, **{m: head.module for m, head in backbone.heads.items()}},
        "base_projection": {n: list(s[1:]) for n, s in head_shapes(backbone, 1).items()},
    }
    extra = {LAYOUT: layout, "pdd_allowed_steps": list(step_counts(facts))}
    if student.adapters is not None:
        extra |= {"lora_rank": student.adapters.rank, "lora_alpha": float(student.adapters.alpha)}
    weights = student.whole() | banks(student, layout)
    config = {**backbone.config, **changed}
    write_component(folder / "transformer", config, weights, metadata(student, options, **own, **extra))
    origin = {"base_model": name, "base_model_revision": revision or "unknown"}
    write_json(folder / SIDECAR, {**own, **extra, **origin})


def read(path: Path, options: Options) -> Portable:
    """
    Raises:
        ValueError: one line: damage, a configuration that is not the base model's widened, a bank whose layout nobody says.
    """
    backbone = base_backbone(options, "modelopt")
    folder = path / "transformer"
    where, file = str(folder), folder / "config.json"
    config = read_json(file)
    channels = backbone.config.get("out_channels") or backbone.config.get("in_channels") or 0
    found = integer(config.get("out_channels"), "out_channels", str(file))
    if not channels or found % channels:
        raise ValueError(f"{file}: out_channels is {found}; allowed are multiples of the base model's {channels}")
    steps = found // channels
    require_base(config, backbone.config, widened_config(backbone, steps), file)
    sidecar = read_json(path / SIDECAR) if (path / SIDECAR).exists() else {}
    if sidecar and sidecar.get("grid_size") != steps:
        raise ValueError(
            f"{path / SIDECAR}: grid_size is {sidecar.get('grid_size')!r}; needed is {steps}, by out_channels"
        )
    tensors, header = read_component(folder)
    # the format's banks are head-major where that is all there can be; elsewhere somebody must say
    said = [v for v in (header.get(LAYOUT), sidecar.get(LAYOUT), options.layout) if v is not None]
    layout = said[0] if said else HEAD_MAJOR if layout_of(backbone) == HEAD_MAJOR else None
    if layout not in (HEAD_MAJOR, PATCH_MAJOR) or any(v != layout for v in said):
        raise ValueError(
            f"{where}: {LAYOUT} is {' and '.join(map(str, said)) or None}; a bank of two axes needs one of {HEAD_MAJOR}, "
            f"{PATCH_MAJOR}"
        )
    heads = split_banks(tensors, backbone, steps, layout, where)
    shift = sidecar.get("flow_shift")
    given = shift if isinstance(shift, dict) else {} if shift is None else dict.fromkeys(backbone.heads, shift)
    shifts = wanted_shifts(backbone, options, {f"sigma_shift_{m}": s for m, s in given.items()}, str(path / SIDECAR))
    knobs: dict[str, Any] = {"pdd_steps": steps}
    blocks = sidecar.get("inference_blocks")
    widths = (
        blocks if isinstance(blocks, list) and blocks and all(type(b) is int and b > 0 for b in blocks) else [steps]
    )
    if blocks is not None and (widths is not blocks or sum(widths) != steps):
        raise ValueError(f"{path / SIDECAR}: inference_blocks is {blocks!r}; allowed are widths whose sum is {steps}")
    for name, default in (("block_size_min", min(widths)), ("block_size_max", max(widths))):
        value = sidecar.get(name, (options.block_size_max if name == "block_size_max" else None) or default)
        knobs[name] = integer(value, name, str(path / SIDECAR))
    ours = header.get(OURS)
    if number(sidecar.get("grid_max_t", LARGEST), "grid_max_t", str(path / SIDECAR)) == LARGEST and not plain(ours):
        grid = clamped(steps, shifts, LARGEST)
        knobs |= {"grid_max_t": grid.max_t}
        facts = foreign("modelopt", backbone, options, knobs, ours, where, grid)
        facts["shift"] = shifts  # of the levels before they were cut
    else:
        knobs |= {"shift": shifts, "grid_max_t": sidecar["grid_max_t"]}
        facts = foreign("modelopt", backbone, options, knobs, ours, where)
    return checked(Portable(backbone, facts, heads, trunk=tensors), where)


def plain(ours: str | None) -> bool:
    """Does our own entry say that the student was written here all the same, from a grid of another kind?"""
    try:
        return ours is not None and not json.loads(ours).get("sigmas")
    except (ValueError, AttributeError):
        return False
