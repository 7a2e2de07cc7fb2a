"""Qwen-Image: pictures ``[B, C, H, W]`` packed to tokens ``[B, T, 4C]``, time ``sigma``, velocity ``eps - x0``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pdd.backbones.base import Size, State, standardized, unrounded
from pdd.backbones.flux import Packed

# configurations of its kin that need inputs of their own: layered, editing and guidance-distilled ones
NEED_MORE = ("use_additional_t_cond", "use_layer3d_rope", "zero_cond_t", "guidance_embeds")


class QwenImage(Packed):
    """Qwen-Image from text alone. Its pipeline always rescales the guided velocity, as ``guidance_rescale`` does.

    The VAE's latents have a frame axis of one, which a state leaves out. Padded text changes nothing: it is masked, and
    a picture's positions do not count it; so conditional and unconditional samples padded alike share a forward.
    """

    columns = ("prompt_embeds", "prompt_embeds_mask")
    # of both streams
    lora_targets = (
        "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,"
        "img_mlp.net.0.proj,img_mlp.net.2,txt_mlp.net.0.proj,txt_mlp.net.2"
    )
    no_guidance = {"true_cfg_scale": 1.0}

    def __init__(self, configs: Mapping[str, Mapping[str, Any]], size: Size):
        super().__init__(configs, size)
        if found := [name for name in NEED_MORE if self.config.get(name)]:
            raise ValueError(f"transformer has {found[0]} true; allowed is a Qwen-Image that takes text alone")

    @property
    def scale(self) -> int:
        return 2 ** len(self.configs["vae"]["temperal_downsample"]) if "vae" in self.configs else 8

    def encode_media(self, vaes: Mapping[str, Any], media: State) -> State:
        return {"image": standardized(vaes["vae"], media["image"][:, :, None])[:, :, 0]}

    def encode_prompts(self, pipe: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, mask = pipe.encode_prompt(prompts, device=pipe.device, max_sequence_length=max_sequence_length)
        return padded(embeds, mask, max_sequence_length)

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
        grid = (1, *(side // self.patch for side in image.shape[2:]))
        with unrounded(transformer.time_text_embed, *self.times(sigma["image"])):
            out = transformer(
                hidden_states=self.pack(image).to(dtype),
                timestep=sigma["image"],  # times 1000 inside
                encoder_hidden_states=embeds.to(dtype),
                encoder_hidden_states_mask=mask,
                img_shapes=[[grid]] * len(image),
                return_dict=False,
            )[0]  # [B, T, D * 4C]
        return {"image": self.unpack(out, directions["image"], image.shape[2])}


def padded(embeds: Tensor, mask: Tensor | None, length: int) -> dict[str, Tensor]:
    """Columns of texts ``[B, L, E]`` padded to ``[B, length, E]``; no mask is a mask of ones."""
    mask = embeds.new_ones(embeds.shape[:2], dtype=torch.long) if mask is None else mask
    more = length - embeds.shape[1]
    return {
        "prompt_embeds": nn.functional.pad(embeds, (0, 0, 0, more)),
        "prompt_embeds_mask": nn.functional.pad(mask, (0, more)),
    }


def without_padding(embeds: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Text ``[B, L, E]`` cut to the batch's longest, and its mask ``[B, L]``; None, the fastest, where all is text."""
    mask = mask.bool()
    used = mask.any(0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    mask = mask[:, :length]
    return embeds[:, :length], None if mask.all() else mask
