"""Flux.1: pictures ``[B, C, H, W]`` packed to tokens ``[B, H/2 * W/2, 4C]``, time ``sigma``, velocity ``eps - x0``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn

from pdd.backbones.base import Backbone, Head, Size, State, Weaker, at_least_float32, patch_norm, unrounded

if TYPE_CHECKING:
    from pdd.config import Guidance

# what FluxPipeline embeds unless told otherwise; the student learns the teacher under it
EMBEDDED_GUIDANCE = 3.5


class Packed(Backbone):
    """Families whose pipeline packs pictures to tokens ``(C, ph, pw)`` and whose transformer passes tokens through."""

    heads = {"image": Head("proj_out")}
    patch = 2  # side of the square of latents that one token holds
    default_latents = 128  # side of the pipeline's default picture, in latents
    no_guidance: dict[str, float]  # argument of the pipeline, and its value when nothing is added to the transformer

    @property
    def scale(self) -> int:
        """Pixels that one latent spans."""
        raise NotImplementedError

    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        unit, sides = self.scale * 2, []  # the pipelines want even sides of latents, whatever the patch
        for name in ("height", "width"):
            pixels = getattr(self.size, name)
            if pixels is not None and (pixels <= 0 or pixels % unit):
                raise ValueError(f"{name} is {pixels}; allowed are multiples of {unit}")
            sides.append(self.default_latents if pixels is None else pixels // self.scale)
        return {"image": (self.config["in_channels"] // self.patch**2, *sides)}

    def shifts(self) -> dict[str, float]:
        """Resolution decides where the scheduler shifts dynamically: ``exp(mu)``, mu linear in the number of tokens.

        A scheduler's ``shift_terminal`` is left out: it stretches the pipeline's own sigmas so that the last one before
        0 is that value, whatever their number, which no shift of a continuous clock does.
        """
        if not self.scheduler.get("use_dynamic_shifting"):
            return super().shifts()
        _, height, width = self.latent_shapes()["image"]
        (low, high), (start, end) = (
            [self.scheduler.get(name, default) for name, default in pair]  # the pipelines' own defaults
            for pair in (
                (("base_image_seq_len", 256), ("max_image_seq_len", 4096)), (("base_shift", 0.5), ("max_shift", 1.15)),
            )
        )  # fmt: skip
        mu = start + (end - start) / (high - low) * (height * width / self.patch**2 - low)
        return {"image": mu if self.scheduler.get("time_shift_type") == "linear" else math.exp(mu)}

    def tokens(self) -> dict[str, int]:
        return {m: count // self.patch**2 for m, count in super().tokens().items()}

    def times(self, sigma: Tensor) -> tuple[Tensor, ...]:
        """What the transformer's time embedding reads first at noise levels ``[B]``; see :func:`pdd.backbones.base.unrounded`."""
        return (sigma,)

    def fit_pipeline(self, pipe: Any) -> None:
        scheduler, more = pipe.scheduler, len(self.times(torch.zeros(0))[0])  # rows beside the samples' own

        def exact(embedding: nn.Module, args: tuple) -> tuple:
            sigma = scheduler.sigmas[scheduler.step_index or 0].to(args[0].device)
            times = self.times(sigma.expand(len(args[0]) - more))
            return (*times, *args[len(times) :])

        pipe.transformer.time_text_embed.register_forward_pre_hook(exact)

    def pack(self, latents: Tensor) -> Tensor:
        """``[B, C, H, W]`` -> tokens ``[B, H/p * W/p, C * p * p]``."""
        return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=self.patch, q=self.patch)

    def unpack(self, tokens: Tensor, directions: int, height: int) -> Tensor:
        """Tokens with rows ``(D, C, ph, pw)`` -> ``[B, D, C, H, W]``, float32 or better.

        Args:
            height: H, in latents.
        """
        return at_least_float32(rearrange(
            tokens, "b (h w) (d c p q) -> b d c (h p) (w q)", d=directions, p=self.patch, q=self.patch,
            h=height // self.patch,
        ))  # fmt: skip

    def token_norm(self, velocity: State) -> State:
        return {"image": patch_norm(velocity["image"], (self.patch,) * 2)}

    def pipeline_arguments(self) -> dict[str, Any]:
        _, *sides = self.latent_shapes()["image"]
        return {**self.no_guidance, **{name: side * self.scale for name, side in zip(("height", "width"), sides)}}

    def to_pipeline(self, state: State) -> dict[str, Any]:
        return {"latents": self.pack(state["image"])}

    def from_pipeline(self, latents: Any) -> State:
        return {"image": self.unpack(latents, 1, self.latent_shapes()["image"][1])[:, 0]}


class Flux(Packed):
    """Flux.1 dev, schnell and their kin that make pictures from text alone."""

    columns = ("prompt_embeds", "pooled_prompt_embeds")
    # of both streams, then of the blocks with one stream
    lora_targets = (
        "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,"
        "ff.net.0.proj,ff.net.2,ff_context.net.0.proj,ff_context.net.2,proj_mlp,proj_out"
    )
    no_guidance = {"guidance_scale": EMBEDDED_GUIDANCE}

    def __init__(self, configs: Mapping[str, Mapping[str, Any]], size: Size):
        super().__init__(configs, size)
        taken, given = self.config["in_channels"], self.config.get("out_channels")
        if given not in (None, taken):
            raise ValueError(
                f"transformer takes {taken} channels and gives {given}; allowed is a Flux without input pictures"
            )

    @property
    def scale(self) -> int:
        return 2 ** (len(self.configs["vae"]["block_out_channels"]) - 1) if "vae" in self.configs else 8

    def encode_prompts(self, pipe: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, pooled, _ = pipe.encode_prompt(
            prompts, None, device=pipe.device, max_sequence_length=max_sequence_length
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def weaker(self, knobs: Guidance) -> list[Weaker]:
        found = super().weaker(knobs)
        if self.config.get("guidance_embeds") and found:
            raise ValueError(
                f"teacher_guidance_scale is {knobs.teacher_guidance_scale}; allowed is 1, this Flux is guidance-distilled "
                f"(it embeds {EMBEDDED_GUIDANCE})"
            )
        return found

    def times(self, sigma: Tensor) -> tuple[Tensor, ...]:
        guidance = [torch.full_like(sigma, EMBEDDED_GUIDANCE)] if self.config.get("guidance_embeds") else []
        return tuple(1000 * time for time in (sigma, *guidance))

    def forward(
        self,
        transformer: nn.Module,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        directions: dict[str, int],
    ) -> State:
        dtype, image = transformer.proj_out.weight.dtype, state["image"]
        height, width = (side // self.patch for side in image.shape[2:])
        rows, columns = torch.meshgrid(*(torch.arange(n, device=image.device) for n in (height, width)), indexing="ij")
        img_ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1)  # [T, 3]
        guidance = torch.full_like(sigma["image"], EMBEDDED_GUIDANCE) if self.config.get("guidance_embeds") else None
        with unrounded(transformer.time_text_embed, *self.times(sigma["image"])):
            out = transformer(
                hidden_states=self.pack(image).to(dtype),
                timestep=sigma["image"],  # times 1000 inside
                guidance=guidance,
                pooled_projections=cond["pooled_prompt_embeds"].to(dtype),
                encoder_hidden_states=cond["prompt_embeds"].to(dtype),
                txt_ids=img_ids.new_zeros(cond["prompt_embeds"].shape[1], 3),
                img_ids=img_ids,
                return_dict=False,
            )[0]  # [B, T, D * 4C]
        return {"image": self.unpack(out, directions["image"], image.shape[2])}
