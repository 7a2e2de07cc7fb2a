"""What a family says about itself. Everything outside this folder is written against this class alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]  # modality -> [B, ...]


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
    frame_rate = 0.0  # frames per second of a family's videos
    blocks: str | None = None  # list of blocks, one tensor in and out, of which uncond_skip_layer may name one
    # linears that lora_targets names by default, by the ends of their names: attention and feed-forward
    lora_targets = "to_q,to_k,to_v,to_out.0,ff.net.0.proj,ff.net.2"
    batched_guidance = True  # may conditional and unconditional samples share one forward?

    def __init__(self, configs: Mapping[str, Mapping[str, Any]], size: Size):
        self.configs, self.size = {name: dict(config) for name, config in configs.items()}, size
        self.config, self.scheduler = self.configs["transformer"], self.configs.get("scheduler", {})

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

    def check_guidance(self, scale: float) -> None:
        """Refuse what a teacher of this family cannot do.

        Raises:
            ValueError: one line; a guidance-distilled model with a scale other than 1, for example.
        """

    def check_skip(self, layer: int | None) -> None:
        """Refuse an ``uncond_skip_layer`` that is not a block of this transformer.

        Raises:
            ValueError: one line.
        """
        if layer is None:
            return
        if self.blocks is None:
            raise ValueError(
                f"uncond_skip_layer is {layer}; allowed is none, {type(self).__name__} cannot skip a block"
            )
        if not 0 <= layer < self.config["num_layers"]:
            raise ValueError(f"uncond_skip_layer is {layer}; allowed are 0 to {self.config['num_layers'] - 1}")

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

    def encode_prompts(self, pipe: Any, prompts: list[str], max_sequence_length: int | None) -> dict[str, Tensor]:
        """Conditioning columns ``[B, ...]`` of prompts, by the stock pipeline's own text encoders.

        Args:
            pipe: the family's pipeline, of which only tokenizers and text encoders are there.
            max_sequence_length: tokens; None is the pipeline's default.
        """
        raise NotImplementedError

    def pipeline_arguments(self) -> dict[str, Any]:
        """Arguments of the stock pipeline that sample a student: no guidance, this size."""
        size = {name: value for name, value in vars(self.size).items() if value is not None}
        return {"guidance_scale": 1.0, **size}

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

    def to_images(self, latents: State) -> Tensor:
        """Pictures ``[B, C, H, W]`` in [-1, 1] straight from latents, for previews without a decoder."""
        raise NotImplementedError


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
