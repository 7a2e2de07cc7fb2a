"""Every knob, once: its default, its meaning, its unit, and the checks that need nothing but the knobs.

A knob is a flag (``--pdd_steps 64``) and a key of a recipe (``pdd_steps: 64``); both are parsed as YAML. Names are the
seed's where it has one. Everything wrong with them is a :class:`ConfigError` of one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pdd.backbones.base import EXPERTS, Size
from pdd.grid import GRID_MAX_T, carried_step_count, fewest_blocks, partition, widest_block

ROOT = Path(__file__).resolve().parent.parent


class ConfigError(ValueError):
    """Bad input: one line that names the knob, its value and what is allowed. Scripts exit with status 2 on it.

    Args:
        everywhere: does every rank find it, so that the first one may speak for all?
    """

    def __init__(self, message: str, everywhere: bool = True):
        super().__init__(message)
        self.everywhere = everywhere


def status_of(script: str, action: Callable[[], int | None]) -> int:
    """Exit status of a script: what it returns, or 2 after the one line of its :class:`ConfigError`."""
    try:
        return action() or 0
    except ConfigError as error:
        if not error.everywhere or os.environ.get("RANK", "0") == "0":
            print(f"{script}: error: {error}", file=sys.stderr, flush=True)
        return 2


def knob(default: Any, help: str, unit: str = "", choices: Sequence[str] = (), fixed: bool = False) -> Any:
    """A dataclass field with what ``--help`` says about it; ``fixed`` ones may not change when a run is resumed."""
    factory = {"default_factory": lambda: default} if isinstance(default, (list, dict)) else {"default": default}
    return field(**factory, metadata={"help": help, "unit": unit, "choices": tuple(choices), "fixed": fixed})


@dataclass(frozen=True)
class Model:
    """teacher and grid"""

    teacher: str = knob("", "the teacher: a folder as Diffusers saves a pipeline, or a hub's owner/name", fixed=True)
    expert: str | None = knob(
        None, "of a checkpoint with two transformers, the one distilled, over its own part of the clock",
        choices=tuple(EXPERTS), fixed=True,
    )  # fmt: skip
    pdd_steps: int = knob(256, "N: intervals of the fine grid, one head each", fixed=True)
    shift: float | dict | None = knob(
        None, "rational time shift of the grid, one number or modality: number; the teacher's scheduler's if not given",
        fixed=True,
    )  # fmt: skip
    height: int | None = knob(
        None, "height of what is made; the checkpoint's default if not given", "pixels", fixed=True
    )
    width: int | None = knob(None, "width of what is made; the checkpoint's default if not given", "pixels", fixed=True)
    num_frames: int | None = knob(
        None, "length of a video; the checkpoint's default if not given", "frames", fixed=True
    )
    grid_max_t: float = knob(GRID_MAX_T, "base clock at the grid's start", "noise level, 0..1", fixed=True)


@dataclass(frozen=True)
class Method:
    """method"""

    rollout_mode: str = knob(
        "simulate", "where student inputs come from: real latents, or trajectories that the student itself carries",
        choices=("simulate", "data_latent"), fixed=True,
    )  # fmt: skip
    high_steps: int | None = knob(
        None, "of the low expert on prompts alone: forwards in which the frozen high expert takes a trajectory from noise to the "
        "boundary; 16 if not given", "forwards",
    )  # fmt: skip
    high_guidance_scale: float | None = knob(
        None,
        "guidance of that high expert, which is guided as the teacher is else; teacher_guidance_scale if not given",
    )
    high_student: str = knob(
        "", "student of the high expert, a folder, to do so in its place; high_steps must be given"
    )
    block_size_min: int = knob(32, "stride of training starts and of carried trajectories", "intervals", fixed=True)
    block_size_max: int = knob(128, "widest block that is supervised and may be sampled", "intervals")
    student_grid_indices: dict | None = knob(
        None, "explicit nodes of a partition, number of blocks: nodes from 0 to N; balanced if not given", fixed=True
    )
    stagger: str = knob(
        "stream", "what starts at different rungs: streams (rank, accumulation round), or every sample of a batch",
        choices=("stream", "sample"), fixed=True,
    )  # fmt: skip
    type_rk: str = knob(
        "euler", "Runge-Kutta rule of the teacher's target on one interval",
        choices=("euler", "midpoint", "heun", "rk4"),
    )  # fmt: skip
    num_targets: int = knob(1, "supervised heads per student forward, one in each equal part of the window")
    loss_weights: dict = knob({}, "modality: weight in the total loss; 1 if not named")
    precision_decoding: str = knob(
        "fp32", "precision of trajectory arithmetic; forwards keep the model's", choices=("fp32", "fp64", "bf16")
    )


@dataclass(frozen=True)
class Guidance:
    """teacher guidance"""

    teacher_guidance_scale: float | dict = knob(
        1.0, "classifier-free guidance folded into the teacher, one number or modality: number; 1 is none"
    )
    cfg_uncond: str | dict | None = knob(
        None,
        "what the unconditional forward sees: negative_prompt, empty_prompt, zeros or keep, or column: one of them",
    )
    negative_prompt: str = knob("", "prompt of cfg_uncond negative_prompt; a row of the dataset must have it")
    uncond_skip_layer: int | None = knob(
        None,
        "block left out of the unconditional forward (the paper: 10 of Wan 1.3B, 12 of 14B); none if not given",
        "block",
    )
    stg_scale: float | dict = knob(
        0.0, "spatio-temporal guidance, away from self-attention that passes its values on, one number or modality: number; "
        "0 is none",
    )  # fmt: skip
    spatio_temporal_guidance_blocks: list = knob([], "blocks whose self-attention does so (LTX-2.3: 28)", "blocks")
    modality_scale: float | dict = knob(
        1.0,
        "cross-modal guidance, away from modalities that do not see each other, one number or modality: number; 1 is none",
    )
    guidance_rescale: bool = knob(False, "give every guided token the norm of the conditional one")
    guidance_rescale_x0: float | dict = knob(
        0.0, "share by which the guided clean prediction gets the deviation of the unguided one (guidance_rescale of LTX-2's "
        "pipeline), one number or modality: number", "0..1",
    )  # fmt: skip


@dataclass(frozen=True)
class Data:
    """data"""

    data: str = knob(
        "",
        "dataset folder (datasets.save_to_disk), or a file of prompts to encode first; <teacher>/conditioning or /latents "
        "if not given",
        fixed=True,
    )
    prompt_repeats: dict = knob(
        {}, "prompt: how often it is drawn in each pass over the data; once if not named", fixed=True
    )
    seed: int = knob(0, "seed of every draw", fixed=True)


@dataclass(frozen=True)
class Optimization:
    """optimization"""

    train_micro_batch_size_per_gpu: int = knob(1, "batch of one forward", "samples per rank")
    gradient_accumulation_steps: int = knob(1, "forwards per update; each carries its own trajectories")
    max_train_steps: int = knob(1000, "length of the run", "updates")
    learning_rate: float | None = knob(
        None, "learning rate of the backbone, or of its adapters; 1e-5, or 1e-4 of adapters, if not given"
    )
    head_learning_rate: float | None = knob(
        None, "learning rate of the heads; learning_rate, or 1e-5 beside adapters, if not given"
    )
    lr_scheduler: str = knob("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = knob(0, "linear warm-up of the learning rates", "updates")
    betas: list = knob([0.9, 0.999], "AdamW's two averages")
    weight_decay: float = knob(0.0, "AdamW's weight decay")
    gradient_clipping: float = knob(1.0, "largest gradient norm; 0 clips nothing")
    ema_decay: float = knob(0.0, "decay of the weight average that validation and the student then use; 0 keeps none")
    ema_start_step: int = knob(0, "the average restarts from the weights until here", "updates")
    gradient_checkpointing: bool = knob(False, "recompute the backbone's activations in backward")


@dataclass(frozen=True)
class Lora:
    """low-rank adapters instead of full training"""

    lora_rank: int = knob(
        0, "rank of adapters on a frozen backbone that is teacher and student at once; 0 trains all of a student beside its "
        "teacher", fixed=True,
    )  # fmt: skip
    lora_alpha: int | None = knob(
        None, "adapters enter times lora_alpha / lora_rank; lora_rank if not given", fixed=True
    )
    lora_targets: str = knob(
        "", "linears with an adapter: ends of their names, separated by commas; the family's attention and feed-forward ones if "
        "not given", fixed=True,
    )  # fmt: skip
    export_merged: bool = knob(False, "write the student as a whole transformer with its adapters merged in")


@dataclass(frozen=True)
class Run:
    """run"""

    run: str = knob("", "run folder; runs/<recipe>-<time> if not given")
    resume: bool = knob(False, "continue --run, or the newest unfinished run under runs/")
    stop_after: int = knob(0, "stop at this step as an interruption would, saved and resumable; 0 goes on", "updates")
    dry_run: int = knob(0, "print the memory that each of so many ranks would need, and end; 0 trains", "ranks")
    save_every: int = knob(0, "checkpoint interval; 0 saves only when the run ends or is interrupted", "updates")
    keep_last: int = knob(2, "checkpoints kept")
    on_damage: str = knob(
        "previous", "when a checkpoint to resume from is damaged: take the one before it, or stop",
        choices=("previous", "stop"),
    )  # fmt: skip
    max_bad_steps: int = knob(
        10, "end the run after more updates in a row than this whose loss or gradient is not finite"
    )
    log_every: int = knob(10, "interval of log lines", "updates")
    validation_every: int = knob(0, "interval of validation; 0 for none", "updates")
    validation_steps: list = knob([4], "numbers of forwards (NFE) to validate")
    validation_prompts: list = knob([], "prompts to validate; the dataset's first few if empty")
    validation_num: int = knob(8, "samples per validation prompt")
    export_dtype: str = knob("auto", "student's weights on disk", choices=("auto", "fp32", "bf16", "fp16"))


SECTIONS = (Model, Method, Guidance, Data, Optimization, Lora, Run)


@dataclass(frozen=True)
class Config(Run, Lora, Optimization, Data, Guidance, Method, Model):
    """All knobs of a training run; the sections above are only for reading."""

    def __post_init__(self) -> None:
        for name, spec in KNOBS.items():
            object.__setattr__(self, name, _converted(name, spec, getattr(self, name)))
        if self.student_grid_indices is not None:
            nodes = {}
            for blocks, indices in self.student_grid_indices.items():
                nodes[_number(int, "student_grid_indices", blocks)] = [
                    _number(int, f"student_grid_indices[{blocks}]", i) for i in _list(f"student_grid_indices[{blocks}]", indices)
                ]  # fmt: skip
            object.__setattr__(self, "student_grid_indices", nodes)
        self._check()

    # -- checks ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        require = _require
        if not self.teacher:
            raise ConfigError("teacher is not given; allowed is the folder of a teacher, as Diffusers saves a pipeline")
        for name in ("pdd_steps", "block_size_min", "block_size_max", "num_targets", "train_micro_batch_size_per_gpu",
                     "gradient_accumulation_steps", "max_train_steps", "keep_last", "log_every", "validation_num"):  # fmt: skip
            require(getattr(self, name) >= 1, name, getattr(self, name), "an integer >= 1")
        for name in ("warmup_steps", "weight_decay", "gradient_clipping", "ema_start_step", "stop_after", "dry_run", "save_every",
                     "max_bad_steps", "validation_every", "seed", "lora_rank"):  # fmt: skip
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("learning_rate", "head_learning_rate"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "more than 0")
        require(self.high_steps is None or self.high_steps >= 1, "high_steps", self.high_steps, "an integer >= 1")
        for name in HIGH_KNOBS:
            idle = not self.starts_at_boundary and bool(getattr(self, name))
            require(not idle, name, getattr(self, name), "none but with expert low and rollout_mode simulate")
        given = self.high_steps is not None or not self.high_student
        require(given, "high_steps", None, "an integer >= 1 with high_student: the forwards that it is to take")
        scale = self.high_guidance_scale
        allowed = "none, a high_student has its guidance in its weights" if self.high_student else "more than 0"
        require(scale is None or (scale > 0 and not self.high_student), "high_guidance_scale", scale, allowed)
        require(0 < self.grid_max_t <= 1, "grid_max_t", self.grid_max_t, "more than 0 and at most 1")
        for modality, shift in _per_modality(self.shift).items():
            require(_is_number(shift) and shift > 0, f"shift{modality}", shift, "more than 0")
        for modality, weight in self.loss_weights.items():
            require(_is_number(weight) and weight >= 0, f"loss_weights[{modality}]", weight, "0 or more")
        for prompt, times in self.prompt_repeats.items():
            require(isinstance(times, int) and times >= 1, f"prompt_repeats[{prompt}]", times, "an integer >= 1")
        for name in ("teacher_guidance_scale", "modality_scale"):
            for modality, scale in _per_modality(getattr(self, name)).items():
                require(_is_number(scale) and scale > 0, f"{name}{modality}", scale, "more than 0")
        for modality, scale in _per_modality(self.stg_scale).items():
            require(_is_number(scale) and scale >= 0, f"stg_scale{modality}", scale, "0 or more")
        for modality, share in _per_modality(self.guidance_rescale_x0).items():
            require(_is_number(share) and 0 <= share <= 1, f"guidance_rescale_x0{modality}", share, "0 to 1")
        require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "0 for none, or less than 1")
        require(
            len(self.betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in self.betas),
            "betas", self.betas, "two numbers of at least 0 and less than 1",
        )  # fmt: skip
        for name in ("lora_alpha", "lora_targets", "export_merged"):
            idle = not self.lora_rank and bool(getattr(self, name))
            require(not idle, name, getattr(self, name), "none where lora_rank is 0, which trains without adapters")
        # serving programs want a whole number
        require(self.lora_alpha is None or self.lora_alpha >= 1, "lora_alpha", self.lora_alpha, "an integer >= 1")
        self._check_guidance()
        self._check_blocks()

    def _check_guidance(self) -> None:
        policies = self.cfg_uncond.values() if isinstance(self.cfg_uncond, Mapping) else [self.cfg_uncond]
        for policy in policies:
            allowed = ("negative_prompt", "empty_prompt", "zeros", "keep")
            missing = policy is None and self.cfg_uncond is None
            _require(missing or policy in allowed, "cfg_uncond", policy, ", ".join(allowed))
        blocks = self.spatio_temporal_guidance_blocks
        for block in blocks:
            _require(type(block) is int, "spatio_temporal_guidance_blocks", blocks, "a list of integers")
        if any(_per_modality(self.stg_scale).values()):
            allowed = "at least one block when stg_scale is not 0"
            _require(bool(blocks), "spatio_temporal_guidance_blocks", blocks, allowed)
        if any(_per_modality(self.guidance_rescale_x0).values()):
            _require(not self.guidance_rescale, "guidance_rescale", True, "false when guidance_rescale_x0 is not 0")
        if not self.guided:
            return
        allowed = "negative_prompt, empty_prompt or zeros for at least one column when teacher_guidance_scale is not 1"
        _require(any(p not in (None, "keep") for p in policies), "cfg_uncond", self.cfg_uncond, allowed)

    def _check_blocks(self) -> None:
        n, low, high = self.pdd_steps, self.block_size_min, self.block_size_max
        _require(low <= high, "block_size_min", low, f"at most block_size_max {high}")
        _require(high <= n, "block_size_max", high, f"at most pdd_steps {n}")
        try:
            for blocks in self.student_grid_indices or {}:
                partition(n, blocks, self.student_grid_indices)
            if self.rollout_mode == "simulate":
                rungs = carried_step_count(n, low)
                self.require_narrow_blocks("student_grid_indices" if (self.student_grid_indices or {}).get(rungs) else
                                           "block_size_min", rungs)  # fmt: skip
            if self.validation_every:
                _require(self.validation_steps != [], "validation_steps", [], "at least one number of forwards")
                for blocks in self.validation_steps:
                    _require(isinstance(blocks, int), "validation_steps", blocks, "integers")
                    self.require_narrow_blocks("validation_steps", blocks)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from None
        narrowest = n - self.starts[-1]
        allowed = f"at most {narrowest}, the number of heads that the last training start has before it"
        _require(self.num_targets <= narrowest, "num_targets", self.num_targets, allowed)

    def require_narrow_blocks(self, name: str, blocks: int) -> None:
        """Refuse a ``blocks``-block partition whose widest block was not trained (the seed's partition checks)."""
        width = widest_block(partition(self.pdd_steps, blocks, self.student_grid_indices))
        if width > self.block_size_max:
            raise ConfigError(
                f"{name}: {blocks} blocks of pdd_steps {self.pdd_steps} need a block of {width} intervals, wider than "
                f"block_size_max {self.block_size_max}; allowed are {fewest_blocks(self.pdd_steps, self.block_size_max)} "
                "blocks or more"
            )

    # -- derived --------------------------------------------------------------------------------------

    @property
    def carried_nodes(self) -> list[int]:
        """Nodes of the partition that carried trajectories walk (the seed's highest-NFE grid)."""
        blocks = carried_step_count(self.pdd_steps, self.block_size_min)
        return partition(self.pdd_steps, blocks, self.student_grid_indices)

    @property
    def starts(self) -> list[int]:
        """Nodes at which a training forward may start, rising."""
        if self.rollout_mode == "simulate":
            return self.carried_nodes[:-1]
        return list(range(0, self.pdd_steps, self.block_size_min))

    @property
    def guided(self) -> bool:
        """Does the teacher need unconditional forwards?"""
        return any(scale != 1 for scale in _per_modality(self.teacher_guidance_scale).values())

    @property
    def size(self) -> Size:
        return Size(self.height, self.width, self.num_frames)

    @property
    def teacher_dir(self) -> Path:
        weights = f"{EXPERTS.get(self.expert, 'transformer')}/*.safetensors"
        return model_folder(self.teacher, weights, "features/*", "latents/*", "conditioning/*")

    @property
    def starts_at_boundary(self) -> bool:
        """Do trajectories start amid the clock: from real latents where the data has any, else where the high expert gets to?"""
        return self.rollout_mode == "simulate" and self.expert == "low"

    @property
    def data_dir(self) -> Path:
        if self.data:
            return resolve(self.data)
        latents, conditioning = self.teacher_dir / "latents", self.teacher_dir / "conditioning"
        if self.rollout_mode == "data_latent" or (self.starts_at_boundary and latents.exists()):
            return latents
        return conditioning

    @property
    def peak_learning_rates(self) -> tuple[float, float]:
        """Learning rates of backbone (or adapters) and heads after the warm-up; what is not given is as in public trainers."""
        backbone = (1e-4 if self.lora_rank else 1e-5) if self.learning_rate is None else self.learning_rate
        if self.head_learning_rate is not None:
            return backbone, self.head_learning_rate
        return backbone, 1e-5 if self.lora_rank else backbone

    def learning_rates(self, step: int) -> tuple[float, float]:
        """Learning rates of backbone and heads for the update at 0-based ``step``: warm-up, then the schedule."""
        factor = lr_factor(step, self.warmup_steps, self.max_train_steps, self.lr_scheduler)
        backbone, heads = self.peak_learning_rates
        return backbone * factor, heads * factor

    @property
    def alpha(self) -> int:
        """``lora_alpha``, or what stands for it."""
        return self.lora_rank if self.lora_alpha is None else self.lora_alpha

    def to_yaml(self) -> str:
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)


KNOBS: dict[str, dataclasses.Field] = {f.name: f for section in SECTIONS for f in dataclasses.fields(section)}


def lr_factor(step: int, warmup: int, total: int, kind: str) -> float:
    """Share of the learning rate at 0-based ``step``: linear warm-up, then constant, linear or half-cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(total - warmup, 1)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[kind]


def resolve(path: str) -> Path:
    """A path as given, or relative to the repository where only that exists (recipes name ``assets/...``)."""
    here = Path(path).expanduser()
    return here if here.exists() or not (ROOT / here).exists() else ROOT / here


@lru_cache
def model_folder(name: str, *patterns: str) -> Path:
    """Folder of a pipeline: a local one, or that of a hub's ``owner/name``, fetched as far as ``patterns`` and JSON go.

    Raises:
        ConfigError: the name looks like a hub's, and the hub (or its cache, offline) does not have it.
    """
    here = resolve(name)
    if here.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return here
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", *patterns]))
    except Exception as error:  # whatever its network layers raise
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"teacher {name!r} is not a folder, and the hub does not give it: {reason}") from None


# ---------------------------------------------------------------------------------------------- values


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; allowed is {allowed}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def _per_modality(value: Any) -> dict[str, Any]:
    """``{suffix of the knob's name: value}`` of a number that may also be given per modality."""
    if value is None:
        return {}
    return {f"[{k}]": v for k, v in value.items()} if isinstance(value, Mapping) else {"": value}


def _number(kind: type, name: str, value: Any) -> int | float:
    # YAML 1.1 reads 1e-4 as a string, as it has no point; every user of a learning rate writes it so
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or not abs(number) < float("inf") or (kind is int and number != int(number)):
        raise ConfigError(f"{name} is {value!r}; allowed is {'an integer' if kind is int else 'a finite number'}")
    return kind(value) if kind is int and isinstance(value, int) else kind(number)


def _list(name: str, value: Any) -> list:
    if isinstance(value, (str, bool, int, float)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} is {value!r}; allowed is a list")
    return list(value)


HIGH_KNOBS = ("high_steps", "high_guidance_scale", "high_student")  # what a low expert's run on prompts alone reads

# mappings modality: number
NUMBERS = ("shift", "loss_weights", "teacher_guidance_scale", "stg_scale", "modality_scale", "guidance_rescale_x0")


def _mapping(name: str, value: Any) -> dict:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; allowed is a mapping such as {{name: value}}")
    return {k: (_number(float, f"{name}[{k}]", v) if name in NUMBERS else v) for k, v in value.items()}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; allowed is text")
    return str(value)


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; allowed is true or false")
    return value


CONVERT: dict[str, Callable[[str, Any], Any]] = {
    "int": lambda name, value: _number(int, name, value),
    "float": lambda name, value: _number(float, name, value),
    "str": _text,
    "bool": _bool,
    "list": _list,
    "dict": _mapping,
}


def _converted(name: str, spec: dataclasses.Field, value: Any) -> Any:
    """The value in the knob's type, or a :class:`ConfigError` that says what is allowed."""
    kinds = spec.type.split(" | ")
    if value is None and "None" in kinds:
        return None
    kind = "dict" if "dict" in kinds and isinstance(value, Mapping) else kinds[0]
    value = CONVERT[kind](name, value)
    choices = spec.metadata["choices"]
    _require(not choices or value in choices, name, value, ", ".join(choices))
    return value


# ---------------------------------------------------------------------------------------------- sources


def unknown(kind: str, name: str, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, 1, 0.0)
    return ConfigError(f"{kind} {name!r} is not known; the nearest known one is {near[0]!r}")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Knobs of a recipe or of a run's ``config.yaml``."""
    path = resolve(str(path))
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {error.strerror}; allowed is a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"recipe {str(path)!r} is not YAML: {where}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"recipe {str(path)!r} is {type(values).__name__}; allowed is a mapping, knob: value")
    for name in values:
        if name not in KNOBS:
            raise unknown(f"recipe {str(path)!r}: key", str(name), list(KNOBS))
    return dict(values)


class Parser(argparse.ArgumentParser):
    """Flags whose errors are :class:`ConfigError` and propose the nearest known flag."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> None:
        raise ConfigError(message)

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        values, rest = self.parse_known_args(args)
        known = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
        for token in rest:
            if token.startswith("-"):
                raise unknown("flag", token.split("=")[0], known)
            raise ConfigError(f"argument {token!r} belongs to no flag; --help lists them")
        return values


def _flag_value(given: str | list[str] | None, spec: dataclasses.Field) -> Any:
    """A flag's words as a recipe's value: parsed as YAML, except that text stays text; a bare switch is true."""
    if given is None:
        if spec.type != "bool":
            raise ConfigError(f"--{spec.name} needs a value")
        return True
    if spec.type == "str":
        return given
    words = [given] if isinstance(given, str) else given
    try:
        values = [yaml.safe_load(word) for word in words]
    except yaml.YAMLError:
        raise ConfigError(f"{spec.name} is {' '.join(words)!r}; allowed is a YAML value") from None
    return values[0] if len(values) == 1 else values


def training_parser(description: str) -> Parser:
    """The flags of ``train_pdd.py``: one a knob, grouped, and where the knobs come from."""
    parser = Parser(description=description)
    parser.add_argument(
        "--ds_config", help="DeepSpeed configuration, such as ds_configs/zero3.json (engine matters only)"
    )
    parser.add_argument("--recipe", help="YAML of knobs; recipes/digits.yaml if not given")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher passes it
    for section in SECTIONS:
        group = parser.add_argument_group(section.__doc__)
        for spec in dataclasses.fields(section):
            default = spec.default if spec.default is not dataclasses.MISSING else spec.default_factory()
            default = "not given" if default in (None, "") else str(default)
            facts = [default, spec.metadata["unit"], " | ".join(spec.metadata["choices"])]
            help = f"{spec.metadata['help']} ({'; '.join(fact for fact in facts if fact)})".replace("%", "%%")
            several = "*" if spec.type == "list" else "?"
            group.add_argument(f"--{spec.name}", nargs=several, metavar="VALUE", help=help, default=argparse.SUPPRESS)
    return parser


def parse_training(description: str, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Flags of a training run: ``(ds_config, recipe, local_rank)`` and the knobs that were given as flags."""
    args = training_parser(description).parse_args(argv)
    flags = {name: _flag_value(getattr(args, name), spec) for name, spec in KNOBS.items() if hasattr(args, name)}
    return args, {name: _converted(name, KNOBS[name], value) for name, value in flags.items()}
