"""Reading and writing students.

Our own format is two things side by side: ``transformer/``, the widened transformer as Diffusers saves one, with
``pdd_steps`` in its configuration and heads ``[N, out, in]``; and ``pdd_config.json``, the sampling contract. A student
trained with adapters has, in the place of the transformer, the adapters as Diffusers saves and loads them and the heads
``[N, out, in]`` under the base head's names; the rest is its base model's.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pdd import run as runs
from pdd.backbones import EXPERTS, Backbone, Size, backbone_for, read_backbone, read_json
from pdd.config import KNOBS, Config, ConfigError, model_folder, read_yaml
from pdd.float32 import kept_in_float32
from pdd.grid import Grid, Ladder, fewest_blocks, partition, widest_block
from pdd.lora import Adapters, trained_parts
from pdd.run import write_json
from pdd.student import widen

CONTRACT = "pdd_config.json"
MODULAR_INDEX = "modular_model_index.json"
CALIBRATED = "calibrated_grid_indices"  # contract's entry: number of forwards -> nodes
ADAPTERS = "pytorch_lora_weights.safetensors"  # the name that Diffusers looks for
HEADS = "pdd_heads.safetensors"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of weights, by their flags' names


def load_transformer(folder: Path, dtype: torch.dtype, component: str = "transformer") -> nn.Module:
    """A base transformer of a folder as Diffusers saves a pipeline, on the CPU.

    Weights are mapped from disk, not copied, where they are stored in ``dtype``. Buffers (position and rotary tables)
    and the modules that Diffusers keeps in float32 stay float32 whatever ``dtype`` is: rounding them moves every sample.

    Raises:
        ValueError: a file is missing, or its weights do not fit the configuration.
    """
    transformer = empty_transformer(read_json(folder / component / "config.json"))
    _load(transformer, in_dtype(read_weights(folder / component), transformer, dtype), folder / component)
    return transformer


def in_dtype(weights: dict[str, Tensor], transformer: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Weights in a dtype (None: their own), but for buffers and the modules that Diffusers keeps in float32."""
    exact = {name for name, _ in transformer.named_buffers()} | {name for name, *_ in kept_in_float32(transformer)}

    def wanted(name: str, weight: Tensor) -> torch.dtype:
        return torch.float32 if name in exact else dtype or weight.dtype

    return {n: w.to(wanted(n, w)) if w.is_floating_point() else w for n, w in weights.items()}


def text_pipeline(folder: Path, encoders: tuple[str, ...], dtype: torch.dtype, device: str) -> Any:
    """The pipeline of a folder with its ``encoders`` only, see :class:`Backbone`.

    Raises:
        ValueError: a text encoder of a modular pipeline cannot be loaded.
    """
    if is_modular(folder):
        parts = modular_components(folder, encoders, dtype)
        for part in parts.values():
            if isinstance(part, nn.Module):
                part.to(device)
        return SimpleNamespace(**parts, device=torch.device(device))
    index = read_json(folder / "model_index.json")
    parts = {n: None for n, v in index.items() if isinstance(v, list) and (v[0] is None or not n.startswith(encoders))}
    return getattr(diffusers, index["_class_name"]).from_pretrained(folder, dtype=dtype, **parts).to(device)


def is_modular(folder: Path) -> bool:
    """Does the folder hold a pipeline of Diffusers' modular blocks, and no ordinary one?"""
    return (folder / MODULAR_INDEX).exists() and not (folder / "model_index.json").exists()


def modular_components(folder: Path, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Components of a modular pipeline's checkpoint whose names begin so, as far as it says where they are.

    Raises:
        ValueError: one cannot be loaded.
    """
    pipe = diffusers.ModularPipeline.from_pretrained(str(folder))
    specs = {name: pipe.get_component_spec(name) for name in pipe.pretrained_component_names if name.startswith(names)}
    wanted = [n for n, spec in specs.items() if spec.pretrained_model_name_or_path]
    pipe.load_components(names=wanted, dtype=dtype)
    parts = {name: getattr(pipe, name, None) for name in wanted}
    for name, part in parts.items():
        if part is None:  # Diffusers has warned why
            raise ValueError(f"{folder / name} cannot be loaded, or the component {name} that {MODULAR_INDEX} names")
    return parts


def load_autoencoders(folder: Path, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Component -> autoencoder of a pipeline's folder: ``vae``, and ``audio_vae`` where there is sound.

    Raises:
        ValueError: one of a modular pipeline cannot be loaded.
    """
    names = ("vae", "audio_vae")
    if is_modular(folder):
        parts = modular_components(folder, names, dtype)
    else:
        index = read_json(folder / "model_index.json")
        classes = {n: getattr(diffusers, v[1]) for n, v in index.items() if n in names and v[0] is not None}
        parts = {n: cls.from_pretrained(folder / n, dtype=dtype) for n, cls in classes.items()}
    return {name: part.to(device).eval() for name, part in parts.items()}


def empty_transformer(config: dict[str, Any]) -> nn.Module:
    """A transformer without weights, with its computed buffers."""
    cls = getattr(diffusers, config["_class_name"])
    with init_empty_weights(include_buffers=False):
        return cls.from_config({k: v for k, v in config.items() if k != "pdd_steps"})


def _load(transformer: nn.Module, weights: dict[str, Tensor], where: Path) -> None:
    try:
        transformer.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a component's safetensors, one file or shards with an index.

    Raises:
        ValueError: a file is missing or damaged.
    """
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    files = (
        sorted(set(read_json(index)["weight_map"].values()))
        if index.exists()
        else ["diffusion_pytorch_model.safetensors"]
    )
    weights: dict[str, Tensor] = {}
    for name in files:
        path = folder / Path(name).name  # an index names files of its own folder only
        try:
            weights |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    return weights


def contract(config: Config, grid: Grid, backbone: Backbone, step: int, ema: bool) -> dict[str, Any]:
    """What a sampler must know about a student (the seed's inference checkpoint contract)."""
    return {
        "format": "pdd-student",
        "pdd_steps": grid.pdd_steps,
        "grid_max_t": grid.max_t,
        "expert": backbone.expert,
        "component": backbone.component,
        "clock_part": list(grid.part),
        "shift": {m: s.shift for m, s in grid.schedules.items()},
        "block_size_min": config.block_size_min,
        "block_size_max": config.block_size_max,
        "fewest_steps": fewest_blocks(grid.pdd_steps, config.block_size_max),
        "student_grid_indices": config.student_grid_indices,
        "base_model": config.teacher,
        "data": config.data,
        "teacher_guidance_scale": config.teacher_guidance_scale,
        "cfg_uncond": config.cfg_uncond,
        "negative_prompt": config.negative_prompt,
        "uncond_skip_layer": config.uncond_skip_layer,
        "stg_scale": config.stg_scale,
        "spatio_temporal_guidance_blocks": config.spatio_temporal_guidance_blocks,
        "modality_scale": config.modality_scale,
        "guidance_rescale": config.guidance_rescale,
        "guidance_rescale_x0": config.guidance_rescale_x0,
        "type_rk": config.type_rk,
        "rollout_mode": config.rollout_mode,
        "trained_steps": step,
        "ema_decay": config.ema_decay if ema else 0.0,
        "size": dataclasses.asdict(backbone.size),
        "components": {name: config for name, config in backbone.configs.items() if name != backbone.component},
    }


def save_trained(
    folder: Path,
    config: Config,
    backbone: Backbone,
    transformer: nn.Module,
    weights: dict[str, Tensor],
    facts: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Write what a run has trained: the widened transformer, or the adapters and heads, merged if ``export_merged`` says so.

    Args:
        transformer: the one that was trained.
        weights: its trained parameters by name, whole; without adapters its whole state dict.
        dtype: of the base model's weights that adapters are merged into.
    """
    if not config.lora_rank:
        return save_student(folder, backbone, weights, facts)
    adapters, heads = trained_parts(transformer, backbone, weights, config.lora_targets)
    if not config.export_merged:
        return save_adapters(folder, backbone, adapters, heads, facts)
    base = load_transformer(config.teacher_dir, dtype, backbone.component)
    save_student(folder, backbone, adapters.merged(base) | heads, facts)


def save_student(folder: Path, backbone: Backbone, weights: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a student folder; ``pdd_config.json`` comes last, so that a folder which has it is whole.

    Args:
        folder: to be created.
        backbone: the family.
        weights: the widened transformer's state dict.
        facts: the contract.

    Raises:
        RuntimeError: weights are missing, unexpected or of a wrong shape (a size-0 shard, for example).
    """
    transformer = widen(empty_transformer(backbone.config), backbone, facts["pdd_steps"])
    transformer.load_state_dict(weights, assign=True)
    transformer.register_to_config(pdd_steps=facts["pdd_steps"])
    transformer.save_pretrained(folder / "transformer")
    write_json(folder / CONTRACT, facts)


def save_adapters(
    folder: Path, backbone: Backbone, adapters: Adapters, heads: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    """Write a student of adapters and heads; ``pdd_config.json`` comes last, so that a folder which has it is whole.

    Args:
        folder: to be created.
        heads: ``<head>.weight`` ``[N, out, in]`` and ``<head>.bias`` ``[N, out]`` of every modality.
        facts: the contract, to which the adapters' own facts are added.

    Raises:
        ValueError: a tensor is missing, unexpected or of a wrong shape (a size-0 shard, for example).
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = {"lora_rank": adapters.rank, "lora_alpha": adapters.alpha, "lora_targets": adapters.targets}
    known = {f"transformer.{k}": v for k, v in adapters.config().items()}
    # strings for other programs; without the alpha one would take it for the rank, or for 1
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(known), **{k: str(v) for k, v in mine.items()}}
    named = {f"transformer.{name}": tensor.contiguous() for name, tensor in adapters.named().items()}
    save_file(named, folder / ADAPTERS, metadata)
    save_file(heads, folder / HEADS, {"format": "pt", "pdd_steps": str(facts["pdd_steps"])})
    read_adapters(folder, backbone, {**facts, **mine})
    write_json(folder / CONTRACT, {**facts, **mine})


def read_adapters(folder: Path, backbone: Backbone, facts: dict[str, Any]) -> tuple[Adapters, dict[str, Tensor]]:
    """(adapters, heads) of a student's folder, as :func:`save_adapters` takes them.

    Raises:
        ValueError: one line; a tensor is missing, unexpected or of a wrong shape.
    """
    tensors = {}
    for name in (ADAPTERS, HEADS):
        try:
            tensors[name] = load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / name} cannot be read: {' '.join(str(error).split())}") from None
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors[ADAPTERS].items()}
    transformer = widen(empty_transformer(backbone.config), backbone, facts["pdd_steps"])
    try:
        adapters = Adapters.of(named, *(facts[name] for name in ("lora_rank", "lora_alpha", "lora_targets")))
        adapters.check(transformer, backbone)
    except ValueError as error:
        raise ValueError(f"{folder / ADAPTERS}: {error}") from None
    modules = [head.module for head in backbone.heads.values()]
    wanted = {
        f"{module}.{name}": tuple(parameter.shape)
        for module in modules for name, parameter in transformer.get_submodule(module).named_parameters()
    }  # fmt: skip
    found = {name: tuple(tensor.shape) for name, tensor in tensors[HEADS].items()}
    if found != wanted:
        raise ValueError(f"{folder / HEADS} has heads {found}; needed are {wanted}")
    return adapters, tensors[HEADS]


@dataclass
class LoadedStudent:
    """A student read from disk.

    Attributes:
        transformer: widened, with adapters merged in; sampling swaps its heads.
        backbone: its family.
        grid: the grid its heads belong to.
        facts: its contract.
        adapters: those it was trained with, if any.
    """

    transformer: nn.Module
    backbone: Backbone
    grid: Grid
    facts: dict[str, Any]
    adapters: Adapters | None = None

    def nodes(self, steps: int, force: bool = False, calibrated: bool = True) -> list[int]:
        """Partition for so many forwards: the calibrated one, else that of training, else the balanced one.

        Args:
            calibrated: False leaves out what ``eval_pdd.py --calibrate`` found.

        Raises:
            ValueError: out of range, or a block wider than trained and not ``force``.
        """
        found = self.facts.get(CALIBRATED) if calibrated else None
        indices = {int(k): v for k, v in {**(self.facts["student_grid_indices"] or {}), **(found or {})}.items()}
        nodes = partition(self.grid.pdd_steps, steps, indices)
        width, trained = widest_block(nodes), self.facts["block_size_max"]
        if width > trained and not force:
            raise ValueError(
                f"steps {steps} needs a block of {width} intervals but block_size_max was {trained} in training; the smallest "
                f"allowed is {self.facts['fewest_steps']} (--force samples it all the same)"
            )
        return nodes

    @property
    def starts(self) -> list[int]:
        """Nodes at which training forwards started, and N: where :func:`pdd.sampling.adaptive` may end a block."""
        indices = {int(k): v for k, v in (self.facts["student_grid_indices"] or {}).items()}
        stride = self.facts["block_size_min"]
        if self.facts["rollout_mode"] == "simulate":
            return partition(self.grid.pdd_steps, self.grid.pdd_steps // stride, indices)
        return [*range(0, self.grid.pdd_steps, stride), self.grid.pdd_steps]


def find_second(second: str) -> Path:
    """The other expert's student that a script's ``--second`` means: of a run, or a student's own folder.

    Raises:
        ConfigError: there is none.
    """
    for folder in (Path(second), Path(second) / "student"):
        if (folder / CONTRACT).exists():
            return folder
    raise ConfigError(
        f"second {second!r} has no finished student; allowed is the folder of a complete run, or a student's"
    )


def find_student(run: str | None, student: str | None) -> Path:
    """The student's folder that a script's ``--run`` or ``--student`` means.

    Raises:
        ConfigError: both are given, or there is none.
    """
    if run and student:
        raise ConfigError("run and student are both given; allowed is one of them")
    if student:
        if not (Path(student) / CONTRACT).exists():
            raise ConfigError(f"student {student!r} has no {CONTRACT}; allowed is a student's folder")
        return Path(student)
    folder = Path(run) if run else runs.newest(complete=True)
    if folder is None:
        raise ConfigError("there is no complete run under runs/; train one, or name one with --run or --student")
    if not runs.is_complete(folder):
        raise ConfigError(f"run {str(folder)!r} has no finished student; allowed is the folder of a complete run")
    return folder / "student"


def student_config(folder: Path) -> Config:
    """The knobs of the run that a student lies in; of a student alone, those in its contract."""
    if folder.name == "student" and (folder.parent / "config.yaml").exists():
        return Config(**read_yaml(folder.parent / "config.yaml"))
    facts = read_contract(folder)
    known = {name: v for name, v in {**facts, **facts["size"]}.items() if name in KNOBS and v is not None}
    return Config(**{**known, "teacher": facts["base_model"]})


def read_contract(folder: Path) -> dict[str, Any]:
    """The contract of a student folder.

    Raises:
        ValueError: no student there.
    """
    facts = read_json(folder / CONTRACT)
    if facts.get("format") != "pdd-student":
        raise ValueError(f"{folder / CONTRACT} is not a student's: format is {facts.get('format')!r}")
    return facts


def read_student(
    folder: Path, dtype: torch.dtype | None = None, device: str = "cpu", base_model: str | Path | None = None
) -> LoadedStudent:
    """Read a student folder.

    Args:
        dtype: of its weights; None keeps the stored one (the heads', where the rest is the base model's). What Diffusers keeps
            in float32 is so all the same.
        base_model: the teacher of a student of adapters; the one it was trained from if not given.

    Raises:
        ValueError: no student there, its files do not fit together, or no teacher where one is needed.
    """
    facts = read_contract(folder)
    grid = grid_of(facts)
    read = _read_adapted if facts.get("lora_rank") else _read_whole
    transformer, backbone, adapters = read(folder, facts, dtype, base_model)
    return _loaded(transformer, backbone, grid, facts, device, adapters)


def student_without_weights(folder: Path) -> LoadedStudent:
    """What a student's small files say; its transformer has no weights.

    Raises:
        ValueError: no student there.
    """
    facts = read_contract(folder)
    if facts.get("lora_rank"):
        backbone = adapted_backbone(model_folder(facts["base_model"]), facts)
    else:
        backbone = whole_backbone(folder, facts)
    return LoadedStudent(empty_transformer(backbone.config), backbone, grid_of(facts), facts)


def grid_of(facts: dict[str, Any]) -> Grid:
    """The grid of a contract; only students that came from elsewhere have ``sigmas``.

    Raises:
        ValueError: no grid has such facts.
    """
    if facts.get("sigmas"):
        return Ladder(facts["sigmas"])
    return Grid(facts["pdd_steps"], facts["shift"], facts["grid_max_t"], facts.get("clock_part", (1.0, 0.0)))


def _read_adapted(
    folder: Path, facts: dict[str, Any], dtype: torch.dtype | None, base_model: str | Path | None
) -> tuple[nn.Module, Backbone, Adapters]:
    component = facts.get("component", "transformer")
    base = model_folder(str(base_model or facts["base_model"]), f"{component}/*.safetensors")
    backbone = adapted_backbone(base, facts)
    adapters, heads = read_adapters(folder, backbone, facts)
    dtype = dtype or next(iter(adapters.tensors.values()))[0].dtype
    transformer = widen(empty_transformer(backbone.config), backbone, facts["pdd_steps"])
    weights = adapters.merged(load_transformer(base, dtype, component)) | in_dtype(heads, transformer, dtype)
    _load(transformer, weights, folder)
    return transformer, backbone, adapters


def adapted_backbone(base: Path, facts: dict[str, Any]) -> Backbone:
    """The family of a student of adapters, by its base model's folder and its contract."""
    return _backbone(facts, read_json(base / facts.get("component", "transformer") / "config.json"))


def _backbone(facts: dict[str, Any], config: dict[str, Any]) -> Backbone:
    """The family of a contract and its transformer's configuration."""
    # "expert", "component" and "clock_part" are not in the contracts of older students
    configs = {**facts["components"], facts.get("component", "transformer"): config}
    backbone = backbone_for(configs, Size(**facts["size"]))
    backbone.choose(facts.get("expert"))
    return backbone


def _read_whole(
    folder: Path, facts: dict[str, Any], dtype: torch.dtype | None, base_model: str | Path | None
) -> tuple[nn.Module, Backbone, None]:
    backbone = whole_backbone(folder, facts)
    transformer = widen(empty_transformer(backbone.config), backbone, facts["pdd_steps"])
    weights = in_dtype(read_weights(folder / "transformer"), transformer, dtype)
    _load(transformer, weights, folder / "transformer")
    return transformer, backbone, None


def whole_backbone(folder: Path, facts: dict[str, Any]) -> Backbone:
    """The family of a student that is a whole transformer, by its folder and its contract.

    Raises:
        ValueError: the two say different numbers of heads.
    """
    config = read_json(folder / "transformer" / "config.json")
    if config.get("pdd_steps") != facts["pdd_steps"]:
        raise ValueError(
            f"{folder}: transformer/config.json has pdd_steps {config.get('pdd_steps')}, {CONTRACT} has {facts['pdd_steps']}"
        )
    return _backbone(facts, {k: v for k, v in config.items() if k != "pdd_steps"})


def untrained_student(
    base_model: str, like: LoadedStudent, steps: int, dtype: torch.dtype, device: str
) -> LoadedStudent:
    """The checkpoint's other expert as a student before training, one head a step: it takes ``steps`` Euler steps.

    Args:
        base_model: the checkpoint, a folder or a hub's ``owner/name``.
        like: a student of one expert; size, shift and start of the clock are its.

    Raises:
        ValueError: the weights of the other one cannot be read.
    """
    expert = next(name for name in EXPERTS if name != like.backbone.expert)
    folder = model_folder(base_model, f"{EXPERTS[expert]}/*.safetensors")
    backbone = read_backbone(folder, like.backbone.size)
    backbone.choose(expert)
    grid = backbone.grid(steps, like.facts["shift"], like.grid.max_t)
    transformer = widen(load_transformer(folder, dtype, backbone.component), backbone, steps)
    facts = {"student_grid_indices": None, "block_size_max": 1, "fewest_steps": steps}
    return _loaded(transformer, backbone, grid, facts, device)


def _loaded(
    transformer: nn.Module,
    backbone: Backbone,
    grid: Grid,
    facts: dict[str, Any],
    device: str,
    adapters: Adapters | None = None,
) -> LoadedStudent:
    return LoadedStudent(transformer.to(device).eval().requires_grad_(False), backbone, grid, facts, adapters)
