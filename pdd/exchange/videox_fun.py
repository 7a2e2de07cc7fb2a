"""VideoX-Fun: adapters and an absolute bank ``[N, out, in]`` in one file, the grid beside it or in its header.

``pdd.safetensors``, or ``pdd_ema.safetensors`` where the weights are an average, beside ``pdd_config.json``; published files
come alone, with the configuration in their header. Modules have Diffusers' names, adapters the suffixes ``lora_down``
``[rank, in]`` and ``lora_up`` ``[out, rank]``. Its grid starts at noise level 1. Pre-fused files (Qwen-Image 2.1) have one
head a step, noise levels of their own and some weights of the base model replaced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pdd.backbones import read_json
from pdd.exchange.base import (
    OURS,
    SHIFT,
    Options,
    Portable,
    base_backbone,
    base_of,
    check_tensors,
    checked,
    declared,
    foreign,
    head_shapes,
    integer,
    metadata,
    number,
    read_file,
    require_grid,
    require_plain,
    shifts_of,
    spoken,
    step_counts,
    wanted_shifts,
)
from pdd.formats import CONTRACT
from pdd.grid import Grid, Ladder
from pdd.lora import Adapters
from pdd.run import write_json

SUMMARY = "adapters and bank in one file, as VideoX-Fun trains them and alibaba-pai publishes them"
LIVE, AVERAGE = "pdd.safetensors", "pdd_ema.safetensors"
NEEDED = ("pdd_num_steps", "pdd_block_size", "lora_rank", "lora_alpha", "lora_targets")


def write(student: Portable, folder: Path, options: Options) -> None:
    """
    Raises:
        ValueError: a student without adapters, or on another grid.
    """
    adapters, facts = student.adapters, student.facts
    if adapters is None:
        raise ValueError(
            "the student is a whole transformer; videox_fun allows one of adapters (trained with lora_rank)"
        )
    require_plain(student, "videox_fun")
    shifts = shifts_of(student)
    require_grid(student, Grid(facts["pdd_steps"], shifts, 1.0), options, "videox_fun", "grid_max_t 1.0 in training")
    own = {
        "pdd_num_steps": facts["pdd_steps"],
        "pdd_block_size": facts["block_size_min"],
        "lora_rank": adapters.rank,
        "lora_alpha": float(adapters.alpha),
        "lora_targets": adapters.targets,
        "pdd_block_size_max": facts["block_size_max"],
        "pdd_allowed_steps": list(step_counts(facts)),
        "grid_max_t": facts["grid_max_t"],
        **{f"{SHIFT}{m}": shift for m, shift in shifts.items()},
    }
    name, revision = base_of(student, options)
    tensors = dict(student.heads)
    for module, (down, up) in adapters.tensors.items():
        tensors |= {f"{module}.lora_down": down.contiguous(), f"{module}.lora_up": up.contiguous()}
    file = folder / (AVERAGE if student.averaged else LIVE)
    save_file(tensors, file, metadata(student, options, **own))
    origin = {"base_model": name, "base_model_revision": revision or "unknown"}
    write_json(folder / CONTRACT, {**own, **origin, OURS: declared(student)})


def read(path: Path, options: Options) -> Portable:
    """
    Raises:
        ValueError: one line: no such file, damage, a bank that may be anything, a trunk alone, fields that contradict.
    """
    file = path
    if path.is_dir():
        file = path / (AVERAGE if (path / AVERAGE).exists() else LIVE)
    backbone = base_backbone(options, "videox_fun")
    tensors, header = read_file(file)
    said = settings(file, header)
    where = str(file)
    steps, block = (integer(said[name], name, where) for name in ("pdd_num_steps", "pdd_block_size"))
    if block > steps or steps % block:
        raise ValueError(f"{where}: pdd_block_size is {block}; allowed are divisors of pdd_num_steps {steps}")
    rank, targets = integer(said["lora_rank"], "lora_rank", where), said["lora_targets"]
    alpha = number(said["lora_alpha"], "lora_alpha", where)
    if alpha < 1 or alpha != int(alpha):
        raise ValueError(f"{where}: lora_alpha is {alpha}; allowed is a whole number of at least 1")
    if not isinstance(targets, str):
        raise ValueError(f"{where}: lora_targets is {targets!r}; allowed is text, names separated by commas")

    heads = {name: tensors.pop(name) for name in head_shapes(backbone, steps) if name in tensors}
    for name, tensor in heads.items():
        if name.endswith(".weight") and tensor.ndim == 2:
            raise ValueError(
                f"{where}: tensor {name} has shape {list(tensor.shape)}, whose rows may be heads or offsets; needed is "
                "[N, out, in]"
            )
    check_tensors(heads, head_shapes(backbone, steps), where, heads=True)
    replaced, full = {}, said.get("pdd_full_parameters") or []
    if not isinstance(full, list):
        raise ValueError(f"{where}: pdd_full_parameters is {full!r}; allowed is a list of names")
    for name in full:
        if not isinstance(name, str) or name not in tensors:
            raise ValueError(f"{where}: tensor {name} is missing, which pdd_full_parameters names")
        replaced[name] = tensors.pop(name)
    pairs: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        module, _, half = name.rpartition(".")
        if half not in ("lora_down", "lora_up"):
            raise ValueError(f"{where}: tensor {name} is none of this student's")
        pairs.setdefault(module, {})[half] = tensor
    for module, halves in pairs.items():
        for half in ("lora_down", "lora_up"):
            if half not in halves:
                raise ValueError(f"{where}: tensor {module}.{half} is missing")
    adapters = Adapters(
        {m: (h["lora_down"], h["lora_up"]) for m, h in sorted(pairs.items())}, rank, int(alpha), targets
    )

    grid = None
    widest = said.get("pdd_block_size_max", options.block_size_max or block)
    knobs = {
        "pdd_steps": steps,
        "block_size_min": block,
        "block_size_max": integer(widest, "pdd_block_size_max", where),
        "shift": wanted_shifts(backbone, options, said, where),
        "grid_max_t": number(said.get("grid_max_t", 1.0), "grid_max_t", where),
    }
    if said.get("pdd_sigmas"):
        levels = said["pdd_sigmas"]
        if not isinstance(levels, list) or len(levels) != steps + 1 or len(backbone.heads) != 1:
            raise ValueError(f"{where}: pdd_sigmas is {levels!r}; needed are {steps + 1} noise levels of one modality")
        grid = Ladder({m: [number(x, "pdd_sigmas", where) for x in levels] for m in backbone.heads})
        knobs["grid_max_t"] = grid.max_t
    facts = foreign("videox_fun", backbone, options, knobs, said.get(OURS), where, grid)
    if file.name == AVERAGE and not facts["ema_decay"]:
        facts["ema_decay"] = None  # an average, of a decay that is not known
    student = checked(Portable(backbone, facts, heads, adapters=adapters), where)
    if replaced:
        weights = student.whole()
        for name in replaced:
            if name not in weights:
                raise ValueError(f"{where}: tensor {name} is none of this student's")
        student = checked(Portable(backbone, facts, heads, trunk=weights | replaced), where)
    return student


def settings(file: Path, header: dict[str, str]) -> dict[str, Any]:
    """The fields of a file's header and of the configuration beside it, which must not contradict each other.

    Raises:
        ValueError: they do, or one is missing.
    """
    said, beside = spoken(header), file.parent / CONTRACT
    if beside.exists():
        for name, value in read_json(beside).items():
            value = json.dumps(value) if name == OURS and not isinstance(value, str) else value
            if said.setdefault(name, value) != value:
                raise ValueError(f"{beside}: {name} is {value!r} and the header of {file.name} says {said[name]!r}")
    for name in NEEDED:
        if name not in said:
            raise ValueError(f"{file}: {name} is missing, in its header and in a {CONTRACT} beside it")
    return said
