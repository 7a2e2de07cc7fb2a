"""What every format reads into and writes from: one student in memory, and the checks that all of them share."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pdd.backbones import Backbone, read_backbone, read_json
from pdd.config import KNOBS, Config, ConfigError, model_folder
from pdd.formats import (
    CALIBRATED,
    adapted_backbone,
    contract,
    empty_transformer,
    grid_of,
    load_transformer,
    read_adapters,
    read_contract,
    save_adapters,
    save_student,
    whole_backbone,
)
from pdd.grid import Grid, Ladder, Shift, partition, widest_block
from pdd.lora import Adapters
from pdd.run import sync_folder

OURS = "pdd_student"  # entry of a file's metadata: all that a contract says and the format has no name for
LAYOUT = "pdd_bank_layout"  # entry of a file's metadata: how a bank of two axes is laid out
HEAD_MAJOR, PATCH_MAJOR, OFFSETS = "absolute_head_major", "absolute_patch_major", "base_plus_offsets"
LAYOUTS = (HEAD_MAJOR, PATCH_MAJOR, OFFSETS)
ALONE = "without its bank of heads a trunk samples plausible, wrong pictures"
SHIFT = "sigma_shift_"  # entry of a file's metadata, and the modality
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Options:
    """The flags of ``export_pdd.py`` that formats look at; None where not given."""

    base_model: str | None = None
    base_name: str | None = None
    revision: str | None = None
    steps: int | None = None
    shift: dict[str, float] | None = None
    block_size_max: int | None = None
    layout: str | None = None
    force: bool = False


@dataclass
class Portable:
    """A student between formats.

    Attributes:
        backbone: its family.
        facts: its contract, without what :func:`pdd.formats.save_adapters` adds.
        heads: ``<head>.weight`` ``[N, out, in]`` and ``<head>.bias`` ``[N, out]`` of every modality, absolute.
        adapters: those of a student that is its base model and adapters.
        trunk: the rest of any other student's transformer, whole.
    """

    backbone: Backbone
    facts: dict[str, Any]
    heads: dict[str, Tensor]
    adapters: Adapters | None = None
    trunk: dict[str, Tensor] | None = None

    @property
    def grid(self) -> Grid:
        return grid_of(self.facts)

    @property
    def averaged(self) -> bool:
        """Are the weights an average over training?"""
        return self.facts["ema_decay"] != 0  # None: of a decay that is not known

    def whole(self) -> dict[str, Tensor]:
        """The transformer's weights but for its heads, adapters merged in."""
        if self.trunk is not None:
            return self.trunk
        component = self.facts.get("component", "transformer")
        folder = model_folder(self.facts["base_model"], f"{component}/*.safetensors")
        base = load_transformer(folder, next(iter(self.heads.values())).dtype, component)
        return {name: w for name, w in self.adapters.merged(base).items() if name not in self.heads}


# ---------------------------------------------------------------------------------------------- our own format


def load_portable(folder: Path, base_model: str | None) -> Portable:
    """One of our students' folders.

    Raises:
        ValueError: no student there, or its files do not fit together.
    """
    facts = read_contract(folder)
    facts = {**facts, "base_model": base_model or facts["base_model"]}
    if facts.get("lora_rank"):
        base = model_folder(facts["base_model"], "transformer*/config.json")
        backbone = adapted_backbone(base, facts)
        adapters, heads = read_adapters(folder, backbone, facts)
        for name in ("lora_rank", "lora_alpha", "lora_targets"):
            facts.pop(name)
        return checked(Portable(backbone, facts, heads, adapters=adapters), str(folder))
    backbone = whole_backbone(folder, facts)
    weights, _ = read_component(folder / "transformer")
    heads = {name: weights.pop(name) for name in head_shapes(backbone, facts["pdd_steps"]) if name in weights}
    return checked(Portable(backbone, facts, heads, trunk=weights), str(folder))


def save_portable(student: Portable, folder: Path) -> None:
    """Write one of our students' folders: adapters and heads, or a whole transformer."""
    if student.trunk is None:
        save_adapters(folder, student.backbone, student.adapters, student.heads, student.facts)
    else:
        save_student(folder, student.backbone, student.trunk | student.heads, student.facts)


def declared(student: Portable) -> dict[str, Any]:
    """What :data:`OURS` holds: the contract without where its author kept things."""
    kept = {
        k: v for k, v in student.facts.items() if k not in ("format", "base_model", "data", "components", "component")
    }
    return kept


def foreign(
    form: str,
    backbone: Backbone,
    options: Options,
    said: Mapping[str, Any],
    ours: str | None,
    where: str,
    grid: Grid | None = None,
) -> dict[str, Any]:
    """The contract of a student that came in another format.

    Args:
        form: that format.
        said: knobs that the format's own fields give; what else training knew is in ``ours``, or nowhere.
        ours: the entry :data:`OURS`, if the file has it.
        grid: where the noise levels are not those of the knobs.

    Raises:
        ValueError: the two contradict each other, or no run has such knobs; one line.
    """
    known: dict[str, Any] = {}
    if ours is not None:
        try:
            known = json.loads(ours)
            if not isinstance(known, dict) or not isinstance(known.setdefault("size", {}), dict):
                raise ValueError
        except ValueError:
            raise ValueError(f"{where}: {OURS} is not a JSON object") from None
    for name, value in said.items():
        if name in known and not _same(known[name], value):
            raise ValueError(f"{where}: {name} is {value} and {OURS} says {known[name]}; allowed are equal ones")
    knobs = {k: v for k, v in {**known, **known.get("size", {}), **said}.items() if k in KNOBS and v is not None}
    try:
        config = Config(**{"rollout_mode": "simulate", **knobs, "teacher": options.base_model, "data": ""})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    levels = known.get("sigmas")
    if levels is not None and (grid is None or not _same(levels, {m: s.tolist() for m, s in grid.sigma.items()})):
        raise ValueError(f"{where}: {OURS} has noise levels that the format's own fields do not give")
    grid = grid or Grid(config.pdd_steps, config.shift, config.grid_max_t)
    if config.expert is not None:
        raise ValueError(f"{where}: expert is {config.expert!r}; allowed is none, a student of the whole clock")
    step = known.get("trained_steps")
    facts = contract(config, grid, backbone.at(config.size), step if isinstance(step, int) else 0, True)
    if isinstance(grid, Ladder):
        facts["sigmas"] = {m: levels.tolist() for m, levels in grid.sigma.items()}
    if known.get(CALIBRATED):
        try:
            found = {int(k): v for k, v in known[CALIBRATED].items()}
            facts[CALIBRATED] = {str(k): partition(config.pdd_steps, k, found) for k in found}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: {CALIBRATED}: {error}") from None
    if ours is None or "read_from" in known:
        facts["read_from"] = form  # how it was trained is not known: those entries are the knobs' defaults
    return facts


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def base_backbone(options: Options, where: str) -> Backbone:
    """The family of ``--base_model``, whose small files say what foreign ones do not.

    Raises:
        ValueError: not given, or none there.
    """
    if not options.base_model:
        raise ValueError(f"base_model is not given; {where} needs it: the folder of the teacher, or a hub's owner/name")
    backbone = read_backbone(model_folder(options.base_model, "transformer/*.json"))
    if backbone.boundary is not None:
        raise ValueError(
            f"base_model {options.base_model!r} has two experts; allowed is one transformer for the whole clock"
        )
    return backbone


# ---------------------------------------------------------------------------------------------- grids and partitions


def step_counts(facts: Mapping[str, Any]) -> dict[int, list[int]]:
    """Numbers of forwards that the student was trained for -> nodes, from the fewest to a block for each training start."""
    n, widest = facts["pdd_steps"], facts["block_size_max"]
    given = {int(k): v for k, v in {**(facts["student_grid_indices"] or {}), **(facts.get(CALIBRATED) or {})}.items()}
    counts = {k: partition(n, k, given) for k in range(facts["fewest_steps"], max(n // facts["block_size_min"], 1) + 1)}
    return {k: nodes for k, nodes in counts.items() if widest_block(nodes) <= widest}


def wanted_steps(student: Portable, options: Options) -> tuple[int, list[int]]:
    """The number of forwards of ``--steps``, and its nodes; the most if not given.

    Raises:
        ValueError: the student was not trained for it.
    """
    counts = step_counts(student.facts)
    steps = max(counts) if options.steps is None else options.steps
    if steps not in counts:
        raise ValueError(
            f"steps is {steps}; allowed are {', '.join(map(str, counts))}, for which the student was trained"
        )
    return steps, counts[steps]


def require_grid(student: Portable, grid: Grid, options: Options, name: str, hint: str) -> None:
    """Refuse a student whose noise levels are not those at which a format's programs use its heads.

    Raises:
        ValueError: one line that says how far off they are.
    """
    require_whole_clock(student, name)
    off = max(float((a - grid.sigma[m]).abs().max()) for m, a in student.grid.sigma.items())
    if off > 1e-6 and not options.force:
        raise ValueError(
            f"the student's noise levels are up to {off:.2g} off those that {name} samples at ({hint}); --force writes it all "
            "the same"
        )


def require_whole_clock(student: Portable, name: str) -> None:
    if student.facts.get("expert") is not None:
        raise ValueError(
            f"the student is of the {student.facts['expert']} expert; {name} allows those of the whole clock"
        )


def clamped(steps: int, shifts: Mapping[str, float], largest: float = 0.999) -> Ladder:
    """The grid that starts at 1 and is cut at ``largest``."""
    levels = {m: s.clamp(max=largest).tolist() for m, s in Grid(steps, shifts, 1.0).sigma.items()}
    return Ladder(levels)


def shifts_of(student: Portable) -> dict[str, float]:
    return {m: s.shift for m, s in student.grid.schedules.items()}


def wanted_shifts(backbone: Backbone, options: Options, said: Mapping[str, Any], where: str) -> dict[str, float]:
    """Modality -> shift: what a file says, else ``--shift``, else the base model's schedulers.

    Raises:
        ValueError: two of the first contradict each other, or one is no shift.
    """
    shifts = backbone.shifts()
    asked = options.shift or {}
    asked = dict.fromkeys(shifts, asked[""]) if "" in asked else asked  # one number for all
    for name, shift in asked.items():
        if name not in shifts or not shift > 0:
            raise ValueError(f"shift[{name}] is {shift}; allowed is more than 0 for {', '.join(shifts)}")
        shifts[name] = shift
    for name in shifts:
        if f"{SHIFT}{name}" in said:
            shift = number(said[f"{SHIFT}{name}"], f"{SHIFT}{name}", where)
            if name in asked and not _same(shift, shifts[name]):
                raise ValueError(f"shift[{name}] is {shifts[name]}; allowed is {shift}, which {where} was trained with")
            shifts[name] = shift
    return shifts


def is_plain(grid: Grid) -> bool:
    """Is the grid that of a shift, so that formats can state it?"""
    return all(isinstance(s, Shift) for s in grid.schedules.values())


def require_plain(student: Portable, name: str) -> None:
    if not is_plain(student.grid):
        raise ValueError(f"the student's noise levels follow no shift; {name} cannot state them")


# ---------------------------------------------------------------------------------------------- tensors


def skeleton(backbone: Backbone) -> nn.Module:
    """The base transformer without weights."""
    return empty_transformer(backbone.config)


def head_shapes(backbone: Backbone, steps: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the banks."""
    transformer = skeleton(backbone)
    return {
        f"{head.module}.{name}": (steps, *parameter.shape)
        for head in backbone.heads.values()
        for name, parameter in transformer.get_submodule(head.module).named_parameters()
    }


def checked(student: Portable, where: str) -> Portable:
    """Refuse a student that is not whole, of wrong shapes or dtypes, or not finite.

    Raises:
        ValueError: one line that names the first wrong tensor.
    """
    check_tensors(student.heads, head_shapes(student.backbone, student.facts["pdd_steps"]), where, heads=True)
    transformer = skeleton(student.backbone)
    if student.trunk is not None:
        wanted = {n: tuple(t.shape) for n, t in transformer.state_dict().items() if n not in student.heads}
        check_tensors(student.trunk, wanted, where)
    if student.adapters is not None:
        try:
            student.adapters.check(transformer, student.backbone)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        check_values(student.adapters.named(), where)
    return student


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, tuple], where: str, heads: bool = False) -> None:
    for name, shape in wanted.items():
        if name not in found:
            raise ValueError(f"{where}: tensor {name} is missing{f'; {ALONE}' if heads else ''}")
        if tuple(found[name].shape) != tuple(shape):
            raise ValueError(f"{where}: tensor {name} has shape {list(found[name].shape)}; needed is {list(shape)}")
    for name in found:
        if name not in wanted:
            raise ValueError(f"{where}: tensor {name} is none of this student's")
    check_values(found, where)


def check_values(found: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in found.items():
        if tensor.dtype not in DTYPES.values():
            raise ValueError(f"{where}: tensor {name} is {tensor.dtype}; allowed are {', '.join(DTYPES)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{where}: tensor {name} has values that are not finite")


def flatten(head: Tensor, layout: str, patch: int = 1) -> Tensor:
    """A bank ``[N, out, in]``, or its bias ``[N, out]``, with rows of all heads on one axis."""
    if layout == PATCH_MAJOR:  # (P, N, C): what one patch position has of every head lies together
        return head.unflatten(1, (patch, -1)).transpose(0, 1).flatten(0, 2).contiguous()
    return head.flatten(0, 1)


def unflatten(rows: Tensor, layout: str, steps: int, patch: int = 1) -> Tensor:
    """The inverse of :func:`flatten`."""
    if layout == PATCH_MAJOR:
        return rows.unflatten(0, (patch, steps, -1)).transpose(0, 1).flatten(1, 2).contiguous()
    return rows.unflatten(0, (steps, -1))


def banks(student: Portable, layout: str) -> dict[str, Tensor]:
    patches = {head.module: head.patch for head in student.backbone.heads.values()}
    return {n: flatten(t, layout, patches[n.rpartition(".")[0]]) for n, t in student.heads.items()}


def split_banks(
    tensors: dict[str, Tensor], backbone: Backbone, steps: int, layout: str, where: str
) -> dict[str, Tensor]:
    """Take the banks out of a file's tensors, rows of all heads on one axis, as ``[N, ...]``.

    Raises:
        ValueError: one is missing or of another shape.
    """
    found = {}
    patches = {head.module: head.patch for head in backbone.heads.values()}
    for name, (n, out, *rest) in head_shapes(backbone, steps).items():
        if name not in tensors:
            raise ValueError(f"{where}: tensor {name} is missing; {ALONE}")
        rows = tensors.pop(name)
        if tuple(rows.shape) != (n * out, *rest):
            raise ValueError(f"{where}: tensor {name} has shape {list(rows.shape)}; needed is {[n * out, *rest]}")
        found[name] = unflatten(rows, layout, steps, patches[name.rpartition(".")[0]])
    return found


# ---------------------------------------------------------------------------------------------- values


def number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise ValueError(f"{where}: {name} is {value!r}; allowed is a number")
    return float(value)


def integer(value: Any, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}; allowed is an integer >= 1")
    return value


def spoken(header: Mapping[str, str]) -> dict[str, Any]:
    """A header's strings as the numbers and lists that they spell."""
    said: dict[str, Any] = {}
    for name, value in header.items():
        try:
            said[name] = value if name == OURS else json.loads(value)
        except json.JSONDecodeError:
            said[name] = value
    return said


# ---------------------------------------------------------------------------------------------- files


def metadata(student: Portable, options: Options, **own: Any) -> dict[str, str]:
    """Strings for a safetensors header: a format's own names, and all of the contract."""
    name, revision = base_of(student, options)
    common = {"format": "pt", "base_model": name, "base_model_revision": revision or "unknown"}
    spelled = {k: v if isinstance(v, str) else json.dumps(v) for k, v in own.items()}
    return {**common, **spelled, OURS: json.dumps(declared(student))}


def base_of(student: Portable, options: Options) -> tuple[str, str | None]:
    """(name, revision) of the base model: of a hub's, the revision in its cache; of a folder, its last part for a name."""
    given = student.facts["base_model"]
    folder = model_folder(given, "transformer/config.json")
    hub = folder.parent.name == "snapshots"
    name = options.base_name or (given if hub else folder.resolve().name)
    revision = options.revision or (folder.name if hub and options.base_name in (None, given) else None)
    return name, revision


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file; nothing is unpickled.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def read_component(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a component as Diffusers saves one, in one file or several.

    Raises:
        ValueError: a file is missing or damaged, or the index names one outside the folder.
    """
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if not index.exists():
        return read_file(folder / "diffusion_pytorch_model.safetensors")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index} has no weight_map")
    tensors: dict[str, Tensor] = {}
    facts: dict[str, str] = {}
    for name in dict.fromkeys(places.values()):
        if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
            raise ValueError(f"{index} names {name!r}; allowed are files of its own folder")
        here, facts = read_file(folder / name)
        tensors |= here
    for name in places:
        if name not in tensors:
            raise ValueError(f"{folder}: tensor {name} is missing, which {index.name} names")
    return tensors, facts


def write_component(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], facts: dict[str, str]) -> None:
    """A component as Diffusers saves one, its files' headers with ``facts``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    save_torch_state_dict(tensors, folder, filename_pattern=pattern, max_shard_size="10GB", metadata=facts)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that appears under its name when all in it is written and on the disk, and else not at all.

    Raises:
        ConfigError: something is there already, or nothing can be written there.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"out is {str(out)!r}, which exists; allowed is a new folder")
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in draft.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        os.rename(draft, out)
        sync_folder(out.parent)
    except OSError as error:
        raise ConfigError(f"out {str(out)!r} cannot be written: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
