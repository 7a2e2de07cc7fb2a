"""Diffusers: a student with its adapters merged, for :func:`pdd.pipeline.load_student`; or a pipeline for one number of forwards.

With ``--steps K`` the folder is the base model's pipeline with an ordinary transformer, whose last linears are the fused heads of
the first block, and a plain Euler scheduler. For one forward that is all. For more, ``pdd_blocks.safetensors`` has the last
linears of every block, ``[K, out, in]``, and a callback of a few lines, in the model card, puts each in its place.
"""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file

from pdd.backbones import read_json
from pdd.config import model_folder
from pdd.exchange.base import (
    Options,
    Portable,
    base_of,
    metadata,
    require_grid,
    require_whole_clock,
    skeleton,
    spoken,
    step_counts,
    wanted_steps,
)
from pdd.formats import save_student
from pdd.grid import Ladder
from pdd.heads import ParallelHead
from pdd.run import write_json

SUMMARY = "a whole student for load_student; with --steps a stock pipeline for so many forwards"
BLOCKS = "pdd_blocks.safetensors"


def write(student: Portable, folder: Path, options: Options) -> None:
    """
    Raises:
        ValueError: with ``--steps``: a number that was not trained, a grid that does not start at 1, or a pipeline that cannot be
            called with the student's noise levels.
    """
    if options.steps is None:
        name, revision = base_of(student, options)
        own = {
            "base_model_name": name,
            "base_model_revision": revision,
            "allowed_steps": list(step_counts(student.facts)),
        }
        if student.adapters is not None:
            own["merged_adapters"] = {"lora_rank": student.adapters.rank, "lora_alpha": student.adapters.alpha}
        save_student(folder, student.backbone, student.whole() | student.heads, {**student.facts, **own})
        return
    write_pipeline(student, folder, options)


def write_pipeline(student: Portable, folder: Path, options: Options) -> None:
    require_whole_clock(student, "a stock pipeline")  # Wan's cannot be called with the noise levels of two
    steps, nodes = wanted_steps(student, options)
    levels = list(student.grid.sigma.values())
    if any((a != levels[0]).any() for a in levels):
        raise ValueError("the student's modalities have different shifts; with steps allowed are equal ones")
    at_one = Ladder({m: [1.0, *s[1:].tolist()] for m, s in student.grid.sigma.items()})
    require_grid(student, at_one, options, "a stock pipeline", "grid_max_t 1.0 in training")
    base = model_folder(student.facts["base_model"], "*")
    if not (base / "model_index.json").exists():
        raise ValueError(
            f"base model {str(base)!r} has no model_index.json; allowed with steps is an ordinary pipeline"
        )
    index = read_json(base / "model_index.json")
    takes = inspect.signature(getattr(diffusers, str(index["_class_name"])).__call__).parameters
    if steps > 1 and not {"sigmas", "callback_on_step_end"} <= set(takes):
        raise ValueError(f"steps is {steps}; allowed is 1, {index['_class_name']} cannot be called with noise levels")
    heads = fused_heads(student, nodes)
    transformer = skeleton(student.backbone)
    transformer.load_state_dict(student.whole() | {n: h[0].clone() for n, h in heads.items()}, assign=True)
    transformer.save_pretrained(folder / "transformer")
    for path in base.iterdir():
        if path.is_dir() and path.name in index and path.name not in ("transformer", "scheduler"):
            shutil.copytree(path, folder / path.name)
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")
    scheduler = {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}
    write_json(folder / "model_index.json", {**index, **scheduler})
    sigmas = levels[0][nodes[:-1]].tolist()
    own = {"pdd_steps": student.facts["pdd_steps"], "pdd_step_indices": nodes, "sigmas": sigmas,
           "pdd_allowed_steps": [steps]}  # fmt: skip
    if steps > 1:
        save_file(heads, folder / BLOCKS, metadata(student, options, **own))
    write_json(folder / "pdd_blocks.json", spoken(metadata(student, options, **own)))


@torch.no_grad()
def fused_heads(student: Portable, nodes: list[int]) -> dict[str, torch.Tensor]:
    """``<head>.weight`` ``[K, out, in]`` and ``<head>.bias`` ``[K, out]``: the last linears of a partition's blocks."""
    transformer, found = skeleton(student.backbone), {}
    for m, head in student.backbone.heads.items():
        bank = ParallelHead(transformer.get_submodule(head.module), student.facts["pdd_steps"], head.patch)
        bank.load_state_dict({n: student.heads[f"{head.module}.{n}"] for n, _ in bank.named_parameters()}, assign=True)
        linears = [bank.fuse(student.grid.fused_plan(a, b)[m]) for a, b in zip(nodes, nodes[1:])]
        for name, _ in bank.named_parameters():
            found[f"{head.module}.{name}"] = torch.stack([getattr(linear, name).data for linear in linears])
    return found
