"""A tiny random Flux.1 dev checkpoint, and its stock pipeline's own trajectory."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from pdd.backbones import Size

ABSENT = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
NO_GUIDANCE = True  # guidance-distilled
SIZE = Size(height=16, width=24)


def build(folder: Path, **changes) -> None:
    """Save the pipeline as Diffusers does; its text encoders are left out."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(**{
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 12, "pooled_projection_dim": 10, "guidance_embeds": True,
        "axes_dims_rope": (2, 2, 4), **changes,
    })  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4, norm_num_groups=4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06,
        scaling_factor=1.5,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    FluxPipeline(transformer=transformer, vae=vae, scheduler=scheduler, **dict.fromkeys(ABSENT)).save_pretrained(folder)


def conditioning(batch: int, seed: int) -> dict[str, torch.Tensor]:
    """Random conditioning, every column as the dataset holds it ``[B, ...]``."""
    g = torch.Generator().manual_seed(seed)
    return {
        "prompt_embeds": torch.randn(batch, 7, 12, generator=g),
        "pooled_prompt_embeds": torch.randn(batch, 10, generator=g),
    }


def stock(
    folder: Path,
    state: dict[str, torch.Tensor],
    sigmas: dict[str, list[float]],
    cond: dict[str, torch.Tensor],
    uncond: dict[str, torch.Tensor] | None = None,
    guidance: float = 1.0,
) -> dict[str, torch.Tensor]:
    """The stock pipeline's last latents, in this project's layout.

    Args:
        state: what the pipeline starts from.
        sigmas: modality -> noise levels of its steps, the final 0 left out.
        cond, uncond: conditional and unconditional columns.
        guidance: its true guidance scale; the embedded one is the pipeline's default.
    """
    pipe = FluxPipeline.from_pretrained(folder, **dict.fromkeys(ABSENT))
    # the sigmas given are final: its scheduler would shift them once more
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    pipe.set_progress_bar_config(disable=True)
    negative = {f"negative_{name}": value for name, value in (uncond or {}).items()}
    batch, channels, *sides = state["image"].shape
    height, width = (side * 2 for side in sides)
    tokens = pipe(
        **cond, **negative, latents=pipe._pack_latents(state["image"], batch, channels, *sides), sigmas=sigmas["image"],
        num_inference_steps=len(sigmas["image"]), true_cfg_scale=guidance, height=height, width=width,
        output_type="latent",
    ).images  # fmt: skip
    return {"image": pipe._unpack_latents(tokens, height, width, pipe.vae_scale_factor)}
