"""The model card beside every export."""

from __future__ import annotations

import re
from pathlib import Path

from pdd.backbones import read_json
from pdd.exchange import format_of
from pdd.exchange.base import Options, Portable, base_of, shifts_of, step_counts, wanted_steps

TASKS = {"image": "text-to-image", "video": "text-to-video"}
ROWS = 12  # of the table of step counts

OURS = """```python
from pdd.pipeline import load_student  # of the repository that made this file

pipe = load_student("{folder}", base_model="{base}")
pipe("a prompt", num_inference_steps={steps}, guidance_scale=1)
```"""

FOREIGN = """```sh
python export_pdd.py --from {name} {folder} --base_model {base} --out student
```

makes it a folder that Diffusers' pipelines sample:

""" + OURS.replace("{folder}", "student")

ONE = """```python
import torch
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("{folder}"{absent})
pipe("a prompt", num_inference_steps=1, guidance_scale=1)
```"""

SEVERAL = """```python
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

pipe = DiffusionPipeline.from_pretrained("{folder}"{absent})
blocks = load_file("{folder}/pdd_blocks.safetensors")  # the last linears of every block, [{steps}, out, in]


def place(pipe, step, *rest):  # those of block step + 1
    for name, heads in blocks.items():
        pipe.transformer.get_parameter(name).data.copy_(heads[(step + 1) % {steps}])
    return {{}}


pipe("a prompt", sigmas={sigmas}, num_inference_steps={steps}, guidance_scale=1, callback_on_step_end=place)
```"""


def write_card(student: Portable, folder: Path, name: str, options: Options) -> None:
    """``README.md`` of an export: base model, how to sample, step counts, recipe; the licence is its owner's to fill in.

    Args:
        name: the format.
    """
    facts = student.facts
    base, revision = base_of(student, options)
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None
    counts = step_counts(facts)
    plain = name == "diffusers" and options.steps is not None
    steps, nodes = (
        wanted_steps(student, options) if plain or name == "fastvideo" else (max(counts), counts[max(counts)])
    )
    how = OURS if name == "diffusers" else FOREIGN
    if plain:
        how = ONE if steps == 1 else SEVERAL
        counts = {steps: nodes}
    elif name == "fastvideo":
        counts = {steps: nodes}
    fill = {"folder": ".", "name": name, "base": base if hub else "BASE_MODEL", "steps": steps}
    if plain:  # components that the base model does not have either
        index = read_json(folder / "model_index.json")
        fill["absent"] = "".join(f", {n}=None" for n, v in index.items() if isinstance(v, list) and v[0] is None)
    how = how.format(**fill, sigmas=[round(s, 9) for s in next(iter(student.grid.sigma.values()))[nodes[:-1]].tolist()])
    recipe = {
        "base model": f"{base}, revision {revision or 'not known'}",
        "intervals N": facts["pdd_steps"],
        "largest noise level": facts["grid_max_t"],
        "time shift": "none: noise levels of its own" if facts.get("sigmas") else _listed(shifts_of(student)),
        "widest block trained": facts["block_size_max"],
        "stride of training starts": facts["block_size_min"],
        "adapters": f"rank {student.adapters.rank}, alpha {student.adapters.alpha}" if student.adapters else "none",
        "weight average": "of an unknown decay" if facts["ema_decay"] is None else facts["ema_decay"] or "none",
    }
    if "read_from" not in facts:
        recipe |= {
            "target": f"{facts['type_rk']}, guidance {_listed(facts['teacher_guidance_scale'])}",
            "student inputs": facts["rollout_mode"],
            "updates": facts["trained_steps"],
        }
    task = TASKS.get(student.backbone.modalities[0])
    rows = list(counts.items())
    shown = rows if len(rows) <= ROWS else [*rows[: ROWS - 1], rows[-1]]
    text = [
        "---",
        *([f"base_model: {base}"] if hub else ["# base_model: its name on the hub"]),
        "library_name: diffusers",
        *([f"pipeline_tag: {task}"] if task else []),
        "tags:",
        "- parallel-decoding-distillation",
        "- few-step",
        "# license: to be filled in; a student's licence follows from its base model's",
        "---",
        "",
        f"# A {min(counts)}- to {max(counts)}-forward student" if len(counts) > 1 else f"# A {steps}-forward student",
        "",
        f"Parallel decoding distillation (arXiv:2607.26004) of {base}.",
        "Guidance is in the weights; sample without it, at strength 1.",
        "",
        "**Licence:** not stated yet. Whoever publishes this must fill in `license` above, as the base model's licence allows.",
        "",
        "## Sample it",
        "",
        how,
        *([f"\n{hint}"] if (hint := getattr(format_of(name), "HINT", "")) else []),
        "",
        "## Numbers of forwards",
        "",
        "| forwards | nodes of the grid |",
        "| --- | --- |",
        *[f"| {k} | {', '.join(map(str, n)) if len(n) <= 17 else f'0 to {n[-1]}, {k} blocks'} |" for k, n in shown],
        *([f"\nand every number between {shown[-2][0]} and {shown[-1][0]}."] if len(shown) < len(rows) else []),
        "",
        "## How it was trained",
        "",
        "| | |",
        "| --- | --- |",
        *[f"| {k} | {v} |" for k, v in recipe.items()],
        *(["\nHow else it was trained, the file that it was read from does not say."] if "read_from" in facts else []),
        "",
    ]  # fmt: skip
    (folder / "README.md").write_text("\n".join(text))


def _listed(value) -> str:
    return ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else f"{value:g}"
