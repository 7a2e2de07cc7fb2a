"""Qwen-Image 2.1: pictures ``[B, C, H, W]`` packed to tokens ``[B, T, C]``, time ``sigma``, velocity ``eps - x0``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pdd.backbones.base import State, standardized, unrounded
from pdd.backbones.flux import Packed
from pdd.backbones.qwen_image import padded, without_padding


class QwenImage21(Packed):
    """Qwen-Image 2.1 from text alone: one stream of text and then picture tokens, velocities of both in its output.

    The text's length places the picture on the frame axis, padding included. So text is cut to the longest of the
    batch, as its pipeline encodes it, and the two samples of a guided velocity, whose texts differ, share no forward.
    In a batch of texts of several lengths the shorter ones are placed as its pipeline places them in that batch, which
    is not where it places them alone: a micro-batch of 1 avoids that.
    """

    encoders = ("text_encoder", "processor")
    max_sequence_length = 1024  # its pipeline takes text of any length
    columns = ("prompt_embeds", "prompt_embeds_mask")
    patch, default_latents, scale = 1, 64, 16
    lora_targets = "to_q,to_k,to_v,to_out.0,img_mlp.proj,img_mlp.gate_layer,img_mlp.out"
    no_guidance = {"true_cfg_scale": 1.0}
    batched_guidance = runs_on_meta = False

    def encode_prompts(self, pipe: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, mask, _ = pipe.encode_prompt(prompts, device=pipe.device)
        if embeds.shape[1] > max_sequence_length:
            raise ValueError(
                f"max_sequence_length is {max_sequence_length}; allowed is at least {embeds.shape[1]}, the length of one of "
                f"the prompts from {prompts[0]!r} on, which this pipeline does not cut"
            )
        return padded(embeds, mask, max_sequence_length)

    def times(self, sigma: Tensor) -> tuple[Tensor, ...]:
        # text is modulated from time 0, one more row
        text = sigma.new_zeros(1 if self.config.get("causal_condition", True) else 0)
        return (torch.cat([sigma, text]),)

    @property
    def picture_mode(self) -> str:
        return {3: "RGB", 4: "RGBA"}[self.configs.get("vae", {}).get("in_channels", 4)]

    def encode_media(self, vaes: Mapping[str, Any], media: State) -> State:
        return {"image": standardized(vaes["vae"], media["image"][:, :, None])[:, :, 0]}

    def forward(
        self,
        transformer: nn.Module,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        directions: dict[str, int],
    ) -> State:
        dtype, image = transformer.proj_out.weight.dtype, state["image"]
        embeds, mask = without_padding(cond["prompt_embeds"], cond["prompt_embeds_mask"])
        tokens = self.pack(image)  # [B, T, C]
        # which places of the text encoder's sequence are pictures, each such place standing for 2 x 2 tokens
        is_text, is_image = embeds.new_zeros(embeds.shape[:2]), embeds.new_ones(len(image), tokens.shape[1] // 4)
        with unrounded(transformer.time_text_embed, *self.times(sigma["image"])):
            out = transformer(
                hidden_states=tokens.to(dtype),
                timestep=sigma["image"],  # times 1000 inside
                encoder_hidden_states=embeds.to(dtype),
                encoder_hidden_states_mask=mask,
                img_shapes=[[(1, *image.shape[2:])]] * len(image),
                img_mask=torch.cat([is_text, is_image], 1).bool(),
                return_dict=False,
            )[0]  # [B, L + T, D * C]
        return {"image": self.unpack(out[:, -tokens.shape[1] :], directions["image"], image.shape[2])}

    def pipeline_condition(self, cond: dict[str, Tensor]) -> dict[str, Any]:
        # the stock pipeline would count padding into the picture's position
        embeds, mask = without_padding(cond["prompt_embeds"], cond["prompt_embeds_mask"])
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}
