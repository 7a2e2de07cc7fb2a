"""Wan 2.1 and 2.2 text-to-video: ``[B, C, F, H, W]``, time ``1000 sigma``, velocity ``eps - x0``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from pdd.backbones.base import (
    EXPERTS,
    Backbone,
    Head,
    Size,
    State,
    at_least_float32,
    patch_norm,
    standardized,
    unrounded,
)


class Wan(Backbone):
    """The transformer unpatchifies inside its forward: rows ``(pt, ph, pw, C)``, hence ``patch = pt * ph * pw``.

    A checkpoint with a ``boundary_ratio`` (Wan 2.2 A14B) has two of them: ``transformer`` serves the noise levels from there
    up, ``transformer_2`` those below.
    """

    columns = ("prompt_embeds",)
    blocks = "blocks"
    frame_rate = 16.0
    lora_targets = "to_q,to_k,to_v,to_out.0,ffn.net.0.proj,ffn.net.2"
    default = {"height": 480, "width": 832, "num_frames": 81}  # WanPipeline's

    def __init__(self, configs: Mapping[str, Mapping[str, Any]], size: Size):
        super().__init__(configs, size)
        self.boundary = self.configs.get("pipeline", {}).get("boundary_ratio")
        channels, out = self.config["in_channels"], self.config["out_channels"]
        if out and channels != out:
            raise ValueError(f"transformer takes {channels} channels and gives {out}; allowed is text-to-video")

    @property
    def heads(self) -> dict[str, Head]:
        return {"video": Head("proj_out", math.prod(self.config["patch_size"]))}

    def shifts(self) -> dict[str, float]:
        # UniPC, which the published checkpoints use, has its own name for the shift
        return {"video": float(self.scheduler.get("flow_shift") or self.scheduler.get("shift") or 1.0)}

    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        vae, (pt, *patch) = self.configs.get("vae", {}), self.config["patch_size"]
        time, space = vae.get("scale_factor_temporal", 4), vae.get("scale_factor_spatial", 8)
        frames = self._wanted("num_frames")
        first, unit = time * pt - time + 1, time * pt  # the first latent frame is one frame, each other one is ``time``
        if frames < first or (frames - first) % unit:
            raise ValueError(f"num_frames is {frames}; allowed are {first}, {first + unit}, {first + 2 * unit}, ...")
        sides = []
        for name, p in zip(("height", "width"), patch):
            pixels, unit = self._wanted(name), space * p
            largest = self.config["rope_max_seq_len"] * unit
            if pixels % unit or not 0 < pixels <= largest:
                raise ValueError(f"{name} is {pixels}; allowed are multiples of {unit} up to {largest}")
            sides.append(pixels // space)
        return {"video": (self.config["in_channels"], (frames - 1) // time + 1, *sides)}

    def _wanted(self, name: str) -> int:
        given = getattr(self.size, name)
        return self.default[name] if given is None else given

    def encode_prompts(self, pipe: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, _ = pipe.encode_prompt(
            prompts, None, False, max_sequence_length=max_sequence_length, device=pipe.device
        )
        return {"prompt_embeds": embeds}

    def guide_other(self, scale: float, uncond: dict[str, Tensor]) -> dict[str, Any]:
        guidance = {self.expert: 1.0} | {expert: scale for expert in EXPERTS if expert != self.expert}
        # the pipeline makes unconditional forwards for both experts, or for neither when guidance_scale is not above 1;
        # what it multiplies by is rounded to float32, where this is 1
        return {
            "guidance_scale": max(guidance["high"], math.nextafter(1.0, 2.0)),
            "guidance_scale_2": guidance["low"],
            "negative_prompt_embeds": uncond["prompt_embeds"],
        }

    def encode_media(self, vaes: Mapping[str, Any], media: State) -> State:
        return {"video": standardized(vaes["vae"], media["video"])}

    def forward(
        self,
        transformer: nn.Module,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        directions: dict[str, int],
    ) -> State:
        dtype, embedder = transformer.proj_out.weight.dtype, transformer.condition_embedder
        # [B] for Wan 2.2 TI2V too: it takes a time per token for a clean first frame; from text all are the same
        times = sigma["video"] * 1000
        with unrounded(embedder.time_embedder, embedder.timesteps_proj(times)):
            out = transformer(
                hidden_states=state["video"].to(dtype),
                timestep=times,
                encoder_hidden_states=cond["prompt_embeds"].to(dtype),
                return_dict=False,
            )[0]  # [B, D * C, F, H, W]
        return {"video": at_least_float32(rearrange(out, "b (d c) f h w -> b d c f h w", d=directions["video"]))}

    def token_norm(self, velocity: State) -> State:
        return {"video": patch_norm(velocity["video"], tuple(self.config["patch_size"]))}
