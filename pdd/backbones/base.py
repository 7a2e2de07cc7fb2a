"""What a family says about itself. Everything outside this folder is written against this class alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pdd.grid import Grid, Shift

if TYPE_CHECKING:
    from pdd.config import Guidance


State = dict[str, Tensor]  # modality -> [B, ...]
# two transformers may share the clock: the one of high noise levels and the one of low ones, by their names in Diffusers
EXPERTS = {"high": "transformer", "low": "transformer_2"}
# (transformer, bool [B]) -> a context in which those samples go through a transformer that lacks something. Every module
# runs all the same, for all samples: one batch serves several kinds, and ZeRO-3 gathers what it expects
Perturbation = Callable[[nn.Module, Tensor], AbstractContextManager]


@dataclass(frozen=True)
class Head:
    """Where a modality's last linear sits in the transformer, and its output rows' order.

    Attributes:
        module: dotted name of the ``nn.Linear``.
        patch: positions that one output row spans when rows are position-major ``(P, C)``; 1 when the transformer
            passes tokens through, whatever is inside them.
    """

    module: str
    patch: int = 1


@dataclass(frozen=True)
class Size:
    """What is to be made: knobs of the same names; None is the checkpoint's own default.

    Attributes:
        height, width: pixels.
        num_frames: frames of a video.
    """

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None


@dataclass(frozen=True)
class Weaker:
    """A further prediction of the teacher, which guidance moves away from: ``v + weight (v - weaker v)``.

    Attributes:
        weight: modality -> weight.
        unconditional: does it see the unconditional condition?
        perturbation: what its transformer lacks.
    """

    weight: dict[str, float]
    unconditional: bool = False
    perturbation: Perturbation | None = None


class Backbone:
    """Base of the families: layout, time direction, velocity sign and conditioning of one Diffusers transformer.

    A family converts, in its own file and nowhere else, between this project's convention (noise level sigma 1 -> 0,
    velocity ``eps - x0``, states as the pipeline's unpacked latents) and what its transformer takes and gives.

    Args:
        configs: component of the pipeline -> its configuration: ``transformer``, and ``scheduler``, ``vae``, ... if there.
        size: what is to be made.

    Raises:
        ValueError: a size that the family cannot make; one line that names the knob.
    """

    heads: dict[str, Head]  # modality -> head; its order is the order of modalities everywhere
    columns: tuple[str, ...]  # conditioning columns, each one an argument of the transformer
    encoders: tuple[str, ...] = ("text_encoder", "tokenizer")  # what encodes prompts, by the start of components' names
    max_sequence_length = 512  # tokens of an encoded prompt, where the pipeline is called without saying
    padding_side = "right"  # of encoded prompts
    frame_rate = 0.0  # frames per second of a family's videos
    picture_mode = "RGB"  # channels of the pictures and frames that its autoencoder takes
    blocks: str | None = None  # list of blocks, one tensor in and out, of which uncond_skip_layer may name one
    batched = True  # does the transformer take several samples? else each has a forward of its own
    runs_on_meta = True  # can a forward be dry-run on tensors without values?
    # linears that lora_targets names by default, by the ends of their names: attention and feed-forward
    lora_targets = "to_q,to_k,to_v,to_out.0,ff.net.0.proj,ff.net.2"
    batched_guidance = True  # may conditional and unconditional samples share one forward?
    boundary: float | None = None  # noise level, of the first modality, that parts a checkpoint's two experts
    expert: str | None = None  # which of them this is, a key of EXPERTS
    component = "transformer"  # where in the pipeline its weights are

    def __init__(self, configs: Mapping[str, Mapping[str, Any]], size: Size):
        self.configs, self.size = {name: dict(config) for name, config in configs.items()}, size
        self.config, self.scheduler = self.configs["transformer"], self.configs.get("scheduler", {})

    def choose(self, expert: str | None) -> None:
        """Stand for one of a checkpoint's two experts; for the only transformer of any other checkpoint.

        Raises:
            ValueError: one line that names the knob ``expert``.
        """
        if self.boundary is None:
            if expert is not None:
                raise ValueError(
                    f"expert is {expert!r}; allowed is none, one transformer of this checkpoint serves the whole clock"
                )
            return
        if expert not in EXPERTS:
            raise ValueError(
                f"expert is {expert!r}; allowed are {' and '.join(EXPERTS)}, for this checkpoint has a transformer for noise "
                f"levels above {self.boundary} and another for those below"
            )
        self.expert, self.component = expert, EXPERTS[expert]
        if self.component not in self.configs:
            raise ValueError(f"expert is {expert!r} but the checkpoint has no {self.component}")
        self.config = self.configs[self.component]

    def grid(self, pdd_steps: int, shifts: Mapping[str, float], max_t: float) -> Grid:
        """The fine grid of what :meth:`choose` chose: on the whole clock, or on an expert's part of it.

        Raises:
            ValueError: the clock starts below the boundary, or see :class:`pdd.grid.Grid`.
        """
        if self.expert is None:
            return Grid(pdd_steps, shifts, max_t)
        if not 0 < self.boundary < max_t:
            raise ValueError(f"grid_max_t is {max_t}; allowed is more than {self.boundary}, where the experts part")
        between = Shift(shifts[self.modalities[0]], max_t).fraction(self.boundary)
        return Grid(pdd_steps, shifts, max_t, (1.0, between) if self.expert == "high" else (between, 0.0))

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.heads)

    @property
    def latent_columns(self) -> dict[str, str]:
        """Modality -> dataset column of its real latents; ``latents`` when there is one modality."""
        return {m: "latents" if len(self.heads) == 1 else f"{m}_latents" for m in self.heads}

    def shifts(self) -> dict[str, float]:
        """Modality -> time shift of the checkpoint's own scheduler."""
        return dict.fromkeys(self.heads, float(self.scheduler.get("shift") or 1.0))

    def per_modality(self, value: float | Mapping[str, float], default: float) -> dict[str, float]:
        """Modality -> number, of a knob that is one number or names modalities."""
        named = value if isinstance(value, Mapping) else dict.fromkeys(self.heads, value)
        return {m: float(named.get(m, default)) for m in self.heads}

    def weaker(self, knobs: Guidance) -> list[Weaker]:
        """The further predictions that a teacher guided like this needs, the unconditional one first.

        Raises:
            ValueError: this family cannot do what a knob asks for; one line that names the knob.
        """
        found = []
        for scale, none in (("teacher_guidance_scale", 1.0), ("stg_scale", 0.0), ("modality_scale", 1.0)):
            weight = {m: s - none for m, s in self.per_modality(getattr(knobs, scale), none).items()}
            guided, unconditional = any(weight.values()), scale == "teacher_guidance_scale"
            knob = "uncond_skip_layer" if unconditional else scale
            lacks = knobs.uncond_skip_layer is not None if unconditional else guided
            perturbation = self.perturbation(knob, knobs) if lacks else None
            if guided:
                found.append(Weaker(weight, unconditional, perturbation))
        return found

    def perturbation(self, knob: str, knobs: Guidance) -> Perturbation:
        """What a prediction lacks that ``uncond_skip_layer``, ``stg_scale`` or ``modality_scale`` asks for.

        Raises:
            ValueError: nothing in this family, or not with these knobs.
        """
        if knob == "uncond_skip_layer" and self.blocks is not None:
            layer, count = knobs.uncond_skip_layer, self.config["num_layers"]
            if not 0 <= layer < count:
                raise ValueError(f"uncond_skip_layer is {layer}; allowed are 0 to {count - 1}")
            return partial(skipped, f"{self.blocks}.{layer}")
        raise ValueError(
            f"{knob} is {getattr(knobs, knob)}; allowed is not to give it, {type(self).__name__} has no such guidance"
        )

    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        """Modality -> shape of one sample's latents when no data says it."""
        raise NotImplementedError

    def forward(
        self,
        transformer: nn.Module,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        directions: dict[str, int],
    ) -> State:
        """One forward of the transformer in its own dtype.

        Args:
            transformer: base or widened; its heads then already hold this forward's plans.
            state: modality -> latents ``[B, ...]``.
            sigma: modality -> noise levels ``[B]``, float32.
            cond: column -> conditioning ``[B, ...]``.
            directions: modality -> D, how many directions its head returns; 1 for a base transformer.

        Returns:
            Modality -> velocities ``eps - x0``, ``[B, D, ...]``, float32 or better.
        """
        raise NotImplementedError

    def token_norm(self, velocity: State) -> State:
        """Modality -> norm of every token of a velocity ``[B, ...]``, broadcastable to it."""
        raise NotImplementedError

    def check_prompt_length(self, tokens: int) -> None:
        """Refuse a ``max_sequence_length`` that prompts cannot be padded to.

        Raises:
            ValueError: one line.
        """
        if tokens < 1:
            raise ValueError(f"max_sequence_length is {tokens}; allowed is 1 or more")

    def encode_prompts(self, pipe: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        """Conditioning columns ``[B, ...]`` of prompts, by the stock pipeline's own text encoders.

        Args:
            pipe: the family's pipeline, of which only ``encoders`` are there.
            max_sequence_length: tokens that every prompt is padded to.

        Raises:
            ValueError: a prompt is longer, and the stock pipeline would not cut it; one line.
        """
        raise NotImplementedError

    def encode_media(self, vaes: Mapping[str, Any], media: State) -> State:
        """Latents of real media, modality -> ``[B, ...]``, as the stock pipeline has them before it scales back and decodes.

        Args:
            vaes: component -> autoencoder; ``vae``, ``audio_vae``.
            media: modality -> ``[B, ...]`` of this size: pictures ``[B, C, H, W]`` and videos ``[B, C, F, H, W]`` in [-1, 1],
                sound ``[B, 2, S]`` in [-1, 1] of any length, at :meth:`media_sound_rate`.
        """
        vae = vaes["vae"]
        return {"image": (mode(vae, media["image"]) - vae.config.shift_factor) * vae.config.scaling_factor}

    def media_sound_rate(self, vaes: Mapping[str, Any]) -> int:
        """Samples per second of the sound that :meth:`encode_media` takes."""
        raise NotImplementedError

    def tokens(self) -> dict[str, int]:
        """Modality -> tokens that one sample of this size is to the transformer."""
        shapes = self.latent_shapes()
        return {m: math.prod(shapes[m][1:]) // head.patch for m, head in self.heads.items()}

    def at(self, size: Size) -> Backbone:
        """The same checkpoint for another size."""
        return type(self)(self.configs, size)

    def pipeline_arguments(self) -> dict[str, Any]:
        """Arguments of the stock pipeline that sample a student: no guidance, this size."""
        size = {name: value for name, value in vars(self.size).items() if value is not None}
        return {"guidance_scale": 1.0, **size}

    def modular_pipeline(self, student: Any, parts: dict[str, Any], force: bool) -> Any:
        """The pipeline of a student whose teacher's folder holds one of Diffusers' modular blocks only.

        It is called as an ordinary one is, with this class's arguments, and has ``to``, ``dtype``, ``vae`` (None without
        a decoder), ``set_progress_bar_config``, and a ``scheduler`` with the ``blocks`` of all
        forwards, (start, end) each, and the ``step_index`` of the one under way.

        Args:
            student: a :class:`pdd.formats.LoadedStudent`.
            parts: component -> what was loaded of it, the transformer left out.
            force: allow blocks wider than trained.
        """
        raise ValueError(f"{type(self).__name__} has no pipeline of modular blocks here; allowed is a model_index.json")

    def guide_other(self, scale: float, uncond: dict[str, Tensor]) -> dict[str, Any]:
        """Arguments of the stock pipeline that guide the expert which is not this student's.

        Args:
            scale: its guidance, not 1.
            uncond: what its unconditional forward sees, column -> ``[B, ...]``.
        """
        raise NotImplementedError

    def fit_pipeline(self, pipe: Any) -> None:
        """Let a stock pipeline that was loaded without its text encoders take a dataset's columns."""

    def pipeline_condition(self, cond: dict[str, Tensor]) -> dict[str, Any]:
        """Arguments of the stock pipeline that stand for a dataset's conditioning."""
        return dict(cond)

    def to_pipeline(self, state: State) -> dict[str, Any]:
        """Arguments of the stock pipeline that make it start from a state."""
        (latents,) = state.values()
        return {"latents": latents}

    def from_pipeline(self, latents: Any) -> State:
        """A state from what the stock pipeline returns with ``output_type="latent"``."""
        return {self.modalities[0]: latents}

    def sound_rate(self, pipe: Any) -> int:
        """Samples per second of the sound that a pipeline of this family decodes."""
        raise NotImplementedError

    def to_images(self, latents: State) -> Tensor:
        """Pictures ``[B, C, H, W]`` straight from latents, for previews without a decoder.

        The first channels are picture enough to see a layout (and are the picture where C = 1); of a video, the middle
        frame's.
        """
        image = latents[self.modalities[0]]
        if image.ndim == 5:
            image = image[:, :, image.shape[2] // 2]
        return image[:, : 3 if image.shape[1] >= 3 else 1]


@contextmanager
def hooks(*handles: RemovableHandle) -> Iterator[None]:
    """Inside, these hooks are there."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unrounded(module: nn.Module, *inputs: Tensor) -> AbstractContextManager:
    """Inside, ``module`` reads ``inputs`` as its first arguments, whatever the transformer makes of them.

    Transformers cast what they feed to the dtype of the parameters that they find, which may be an engine's. Of time in 0..1
    bfloat16 has steps of 0.004 near 1, as wide as an interval of a fine grid; sines and cosines made from float32 lose little.
    """
    return hooks(module.register_forward_pre_hook(lambda module, args: (*inputs, *args[len(inputs) :])))


def skipped(block: str, transformer: nn.Module, samples: Tensor) -> AbstractContextManager:
    """Samples that pass by a block, which has one tensor in and out."""

    def keep_input(block: nn.Module, args: tuple, kwargs: dict[str, Any], out: Tensor) -> Tensor:
        hidden = args[0] if args else kwargs["hidden_states"]
        return torch.where(samples.to(out.device).view(-1, *[1] * (out.ndim - 1)), hidden.to(out.dtype), out)

    return hooks(transformer.get_submodule(block).register_forward_hook(keep_input, with_kwargs=True))


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def patch_norm(latents: Tensor, patch: tuple[int, ...]) -> Tensor:
    """Norm over the channels and positions of each token, of latents ``[B, C, ...]`` with those spatial patches."""
    squares = latents.square().sum(1, keepdim=True)  # [B, 1, ...]
    pool = {2: nn.functional.avg_pool2d, 3: nn.functional.avg_pool3d}[len(patch)]
    sums = pool(squares, patch) * math.prod(patch)
    for axis, size in enumerate(patch):
        sums = sums.repeat_interleave(size, axis + 2)
    return sums.sqrt()


def mode(vae: Any, pixels: Tensor) -> Tensor:
    """The most likely latents, in float32: one dataset for all epochs has no use for a draw."""
    dtype = next(vae.encoder.parameters()).dtype  # some stay in float32 whatever the rest is in
    return vae.encode(pixels.to(vae.device, dtype)).latent_dist.mode().float()


def standardized(vae: Any, media: Tensor) -> Tensor:
    """:func:`mode` of ``[B, C, ...]`` by the mean and deviation of every channel that the autoencoder records."""
    latents = mode(vae, media).cpu()
    mean, std = (
        torch.tensor(values).view(1, -1, *[1] * (latents.ndim - 2))
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / std
