"""FastVideo: a whole transformer with a head-major bank ``[N * out, in]``, and a contract for one partition.

``transformer/config.json`` gains ``pdd_steps``; ``fastvideo_inference.json`` says the partition, the shifts and that the grid
starts at 0.999, a fixed point of the shift. Its loader refuses fields that it does not know, so what else there is to say is in
the headers of the weights.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pdd.backbones import read_json
from pdd.exchange.base import (
    HEAD_MAJOR,
    LAYOUT,
    OURS,
    Options,
    Portable,
    banks,
    base_backbone,
    base_of,
    checked,
    foreign,
    integer,
    metadata,
    number,
    read_component,
    require_grid,
    require_plain,
    shifts_of,
    split_banks,
    step_counts,
    wanted_steps,
    write_component,
)
from pdd.grid import Grid, partition
from pdd.run import write_json

SUMMARY = "a whole transformer with a contract for one number of forwards"
CONTRACT, SCHEMA = "fastvideo_inference.json", "fasth3-inference-contract-v1"
MAX_T = 0.999
SCHEDULERS = {"video": "scheduler", "audio": "audio_scheduler"}
KINDS = {("video",): "t2v", ("video", "audio"): "t2va"}
SPARSE = ("attention_backend", "vsa_")  # starts of the fields of students trained with sparse attention
FIELDS = (
    "schema_version", "pdd_steps", "pdd_step_indices", "num_inference_steps", "transformer_forwards", "grid_max_t",
    "video_scheduler_shift", "guidance_scale", "model_type", "transformer_component", "base_model_revision",
)  # fmt: skip


def write(student: Portable, folder: Path, options: Options) -> None:
    """
    Raises:
        ValueError: a family without video, another grid, or a number of forwards that was not trained.
    """
    backbone, facts = student.backbone, student.facts
    if backbone.modalities not in KINDS:
        raise ValueError(
            f"the student makes {', '.join(backbone.modalities)}; fastvideo states shifts of video and audio alone"
        )
    require_plain(student, "fastvideo")
    shifts = shifts_of(student)
    strict = Options(**{**vars(options), "force": False})  # its loader takes no other
    require_grid(student, Grid(facts["pdd_steps"], shifts, MAX_T), strict, "fastvideo", "grid_max_t 0.999 in training")
    steps, nodes = wanted_steps(student, options)
    name, revision = base_of(student, options)
    if revision is None:
        raise ValueError(
            f"revision is not given; fastvideo needs that of base model {name!r}, and its name on a hub as base_name where it is "
            "a folder"
        )
    config = {**backbone.config, "pdd_steps": facts["pdd_steps"]}
    own = {
        LAYOUT: HEAD_MAJOR,
        "pdd_steps": facts["pdd_steps"],
        "pdd_allowed_steps": list(step_counts(facts)),
        **(
            {}
            if student.adapters is None
            else {"lora_rank": student.adapters.rank, "lora_alpha": float(student.adapters.alpha)}
        ),
    }
    weights = student.whole() | banks(student, HEAD_MAJOR)
    write_component(folder / "transformer", config, weights, metadata(student, options, **own))
    for m, shift in shifts.items():
        (folder / SCHEDULERS[m]).mkdir()
        known = backbone.configs.get(SCHEDULERS[m], {"_class_name": "FlowMatchEulerDiscreteScheduler"})
        write_json(
            folder / SCHEDULERS[m] / "scheduler_config.json",
            {**known, **{name: shift for name in ("shift", "flow_shift") if name == "shift" or name in known}},
        )
    write_json(folder / CONTRACT, {
        "schema_version": SCHEMA,
        "model_type": KINDS[backbone.modalities],
        "transformer_component": "transformer",
        "base_model_revision": f"hf://{name}@{revision}",
        "pdd_steps": facts["pdd_steps"],
        "pdd_step_indices": nodes,
        "num_inference_steps": steps,
        "transformer_forwards": steps,
        "grid_max_t": MAX_T,
        **{f"{m}_scheduler_shift": shift for m, shift in shifts.items()},
        "guidance_scale": 1.0,
    })  # fmt: skip


def read(path: Path, options: Options) -> Portable:
    """
    Raises:
        ValueError: one line: damage, fields that are missing, unknown or contradict other files, a trunk alone.
    """
    backbone = base_backbone(options, "fastvideo")
    file = path / CONTRACT
    said, where = read_json(file), str(file)
    if backbone.modalities not in KINDS:
        raise ValueError(
            f"base_model {options.base_model!r} makes {', '.join(backbone.modalities)}; fastvideo's make video"
        )
    wanted = [*FIELDS, *(["audio_scheduler_shift"] if "audio" in backbone.heads else [])]
    for name in wanted:
        if name not in said:
            raise ValueError(f"{where}: {name} is missing")
    fixed = {
        "schema_version": SCHEMA,
        "model_type": KINDS[backbone.modalities],
        "grid_max_t": MAX_T,
        "guidance_scale": 1.0,
    }
    for name, value in fixed.items():
        if said[name] != value:
            raise ValueError(f"{where}: {name} is {said[name]!r}; allowed is {value!r}")
    for name in said:
        if name.startswith(SPARSE):
            raise ValueError(
                f"{where}: {name} is {said[name]!r}; allowed is none, sparse attention has no place in Diffusers"
            )
        if name not in wanted:
            raise ValueError(f"{where}: {name} is not known; allowed are {', '.join(wanted)}")
    component = said["transformer_component"]
    if not isinstance(component, str) or Path(component).name != component or component.startswith("."):
        raise ValueError(f"{where}: transformer_component is {component!r}; allowed is a folder beside it")
    steps, nodes = integer(said["pdd_steps"], "pdd_steps", where), said["pdd_step_indices"]
    if not isinstance(nodes, list) or not all(type(n) is int for n in nodes):
        raise ValueError(f"{where}: pdd_step_indices is {nodes!r}; allowed are integers")
    try:
        partition(steps, len(nodes) - 1, {len(nodes) - 1: nodes})
    except ValueError:
        raise ValueError(
            f"{where}: pdd_step_indices is {nodes}; allowed are strictly rising ones from 0 to {steps}"
        ) from None
    for name in ("num_inference_steps", "transformer_forwards"):
        if said[name] != len(nodes) - 1:
            raise ValueError(
                f"{where}: {name} is {said[name]!r}; allowed is {len(nodes) - 1}, the blocks of pdd_step_indices"
            )
    shifts = {}
    for m in backbone.heads:
        shifts[m] = number(said[f"{m}_scheduler_shift"], f"{m}_scheduler_shift", where)
        scheduler = path / SCHEDULERS[m] / "scheduler_config.json"
        if (shift := read_json(scheduler).get("shift")) != shifts[m]:
            raise ValueError(f"{where}: {m}_scheduler_shift is {shifts[m]} and {scheduler} says {shift!r}")
    config = read_json(path / component / "config.json")
    require_base(config, backbone.config, {"pdd_steps": steps}, path / component / "config.json")
    tensors, header = read_component(path / component)
    where = str(path / component)
    if header.get(LAYOUT, HEAD_MAJOR) != HEAD_MAJOR:
        raise ValueError(f"{where}: {LAYOUT} is {header[LAYOUT]!r}; allowed is {HEAD_MAJOR}")
    heads = split_banks(tensors, backbone, steps, HEAD_MAJOR, where)
    knobs: dict[str, Any] = {"pdd_steps": steps, "shift": shifts, "grid_max_t": MAX_T}
    if OURS not in header:
        widths = [b - a for a, b in zip(nodes, nodes[1:])]
        # starts of blocks are all that is known of where training forwards started
        knobs["block_size_min"] = math.gcd(*widths)
        knobs["block_size_max"] = options.block_size_max or max(widths)
        knobs["student_grid_indices"] = {len(nodes) - 1: nodes}
    facts = foreign("fastvideo", backbone, options, knobs, header.get(OURS), where)
    return checked(Portable(backbone, facts, heads, trunk=tensors), where)


def require_base(config: dict[str, Any], base: dict[str, Any], changed: dict[str, Any], path: Path) -> None:
    """Refuse a transformer whose configuration is not the base model's, but for what the format changes.

    Raises:
        ValueError: one line that names the first entry that differs.
    """
    wanted = {**base, **changed}
    for name in sorted((set(wanted) | set(config)) - {"_diffusers_version", "_name_or_path"}):
        if json.dumps(config.get(name)) != json.dumps(wanted.get(name)):
            raise ValueError(
                f"{path}: {name} is {config.get(name)!r}; needed is {wanted.get(name)!r}, with this base model"
            )
