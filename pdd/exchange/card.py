"""The model card beside every export."""

from __future__ import annotations

import re
from collections.abc import Sequence
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

EXPERTS = """```python
from pdd.pipeline import load_student  # of the repository that made this file

pipe = load_student("{first}", second="{second}", second_steps={second_steps}, base_model="{base}")
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


def write_card(students: Sequence[Portable], folder: Path, name: str, options: Options) -> None:
    """``README.md`` of an export: base model, how to sample, step counts, recipe; the licence is its owner's to fill in.

    Args:
        students: one, or those of both experts, each in a folder of its expert's name.
        name: the format.
    """
    student = students[0]
    base, revision = base_of(student, options)
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None
    plain = name == "diffusers" and options.steps is not None
    counts = [step_counts(one.facts) for one in students]
    if plain or name == "fastvideo":
        steps, nodes = wanted_steps(student, options)
        counts = [{steps: nodes}]
    most = [max(each) for each in counts]
    how = OURS if name == "diffusers" else FOREIGN
    fill = {"folder": ".", "name": name, "base": base if hub else "BASE_MODEL", "steps": sum(most)}
    if plain:
        how = ONE if most == [1] else SEVERAL
        # components that the base model does not have either
        index = read_json(folder / "model_index.json")
        fill["absent"] = "".join(f", {n}=None" for n, v in index.items() if isinstance(v, list) and v[0] is None)
        sigmas = next(iter(student.grid.sigma.values()))[counts[0][most[0]][:-1]]
        fill["sigmas"] = [round(s, 9) for s in sigmas.tolist()]
    elif student.backbone.expert is not None:
        how, alone = EXPERTS, len(students) == 1
        fill |= {"first": ".", "second": "OTHER_EXPERT", "second_steps": most[0], "steps": 2 * most[0]} if alone else {
            "first": students[0].backbone.expert, "second": students[1].backbone.expert, "second_steps": most[1]}  # fmt: skip
    fewest = sum(min(each) for each in counts)
    task = TASKS.get(student.backbone.modalities[0])
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
        f"# A {fewest}- to {sum(most)}-forward student" if fewest < sum(most) else f"# A {sum(most)}-forward student",
        "",
        f"Parallel decoding distillation (arXiv:2607.26004) of {base}.",
        "Guidance is in the weights; sample without it, at strength 1.",
        "",
        "**Licence:** not stated yet. Whoever publishes this must fill in `license` above, as the base model's licence allows.",
        "",
        "## Sample it",
        "",
        how.format(**fill),
        *([f"\n{hint}"] if (hint := getattr(format_of(name), "HINT", "")) else []),
    ]  # fmt: skip
    for one, each in zip(students, counts):
        whose = f" of the {one.backbone.expert} expert" if one.backbone.expert else ""
        text += ["", f"## Numbers of forwards{whose}", "", *_counts(each)]
        text += ["", f"## How {f'that{whose}' if whose else 'it'} was trained", "", *_recipe(one, base, revision)]
    (folder / "README.md").write_text("\n".join([*text, ""]))


def _counts(counts: dict[int, list[int]]) -> list[str]:
    rows = list(counts.items())
    shown = rows if len(rows) <= ROWS else [*rows[: ROWS - 1], rows[-1]]
    return [
        "| forwards | nodes of the grid |",
        "| --- | --- |",
        *[f"| {k} | {', '.join(map(str, n)) if len(n) <= 17 else f'0 to {n[-1]}, {k} blocks'} |" for k, n in shown],
        *([f"\nand every number between {shown[-2][0]} and {shown[-1][0]}."] if len(shown) < len(rows) else []),
    ]


def _recipe(student: Portable, base: str, revision: str | None) -> list[str]:
    facts = student.facts
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
    return [
        "| | |",
        "| --- | --- |",
        *[f"| {k} | {v} |" for k, v in recipe.items()],
        *(["\nHow else it was trained, the file that it was read from does not say."] if "read_from" in facts else []),
    ]


def _listed(value) -> str:
    return ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else f"{value:g}"
