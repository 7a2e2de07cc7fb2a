"""Qwen-Image 2.1: pictures ``[B, C, H, W]`` packed to tokens ``[B, T, C]``, time ``sigma``, velocity ``eps - x0``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pdd.backbones.base import State
from pdd.backbones.flux import Packed, unrounded
from pdd.backbones.qwen_image import without_padding


class QwenImage21(Packed):
    """Qwen-Image 2.1 from text alone: one stream of text and then picture tokens, velocities of both in its output.

    The text's length places the picture on the frame axis, padding included. So text is cut to the longest of the
    batch, as its pipeline encodes it, and the two samples of a guided velocity, whose texts differ, share no forward.
    """

    columns = ("prompt_embeds", "prompt_embeds_mask")
    patch, default_latents, scale = 1, 64, 16
    lora_targets = "to_q,to_k,to_v,to_out.0,img_mlp.proj,img_mlp.gate_layer,img_mlp.out"
    no_guidance = {"true_cfg_scale": 1.0}
    batched_guidance = False

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
        time = sigma["image"]
        if self.config.get("causal_condition", True):
            time = torch.cat([time, time.new_zeros(1)])  # text is modulated from time 0, one more row
        with unrounded(transformer.time_text_embed, time):
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
