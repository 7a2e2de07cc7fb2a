"""Stable Diffusion 3 and 3.5: pictures ``[B, C, H, W]``, time ``1000 sigma``, velocity ``eps - x0``."""

from __future__ import annotations

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from pdd.backbones.base import Backbone, Head, State, at_least_float32, patch_norm


class SD3(Backbone):
    """The transformer unpatchifies inside its forward: rows ``(ph, pw, C)``, hence ``patch = p * p``."""

    columns = ("prompt_embeds", "pooled_prompt_embeds")
    max_sequence_length = 256
    # of both streams
    lora_targets = (
        "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,"
        "ff.net.0.proj,ff.net.2,ff_context.net.0.proj,ff_context.net.2"
    )

    @property
    def heads(self) -> dict[str, Head]:
        return {"image": Head("proj_out", self.config["patch_size"] ** 2)}

    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        scale = 2 ** (len(self.configs["vae"]["block_out_channels"]) - 1) if "vae" in self.configs else 1
        sides = []
        for name in ("height", "width"):
            pixels, unit = getattr(self.size, name), scale * self.config["patch_size"]
            if pixels is not None and (pixels % unit or not 0 < pixels <= self.config["pos_embed_max_size"] * unit):
                largest = self.config["pos_embed_max_size"] * unit
                raise ValueError(f"{name} is {pixels}; allowed are multiples of {unit} up to {largest}")
            sides.append(self.config["sample_size"] if pixels is None else pixels // scale)
        return {"image": (self.config["in_channels"], *sides)}

    def forward(
        self,
        transformer: nn.Module,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        directions: dict[str, int],
    ) -> State:
        dtype = transformer.proj_out.weight.dtype
        # its unpatchify reads the channel count from the module: D directions look like D times the channels
        transformer.out_channels = directions["image"] * (self.config["out_channels"] or self.config["in_channels"])
        out = transformer(
            hidden_states=state["image"].to(dtype),
            timestep=sigma["image"] * 1000,
            encoder_hidden_states=cond["prompt_embeds"].to(dtype),
            pooled_projections=cond["pooled_prompt_embeds"].to(dtype),
            return_dict=False,
        )[0]  # [B, D * C, H, W]
        return {"image": at_least_float32(rearrange(out, "b (d c) h w -> b d c h w", d=directions["image"]))}

    def encode_prompts(self, pipe: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        embeds, _, pooled, _ = pipe.encode_prompt(
            prompts, None, None, device=pipe.device, do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )  # fmt: skip
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def token_norm(self, velocity: State) -> State:
        return {"image": patch_norm(velocity["image"], (self.config["patch_size"],) * 2)}
