"""A tiny random Stable Diffusion 3 checkpoint, and its stock pipeline's own trajectory."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

ABSENT = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"]


def build(folder: Path) -> None:
    """Save the pipeline as Diffusers does; its text encoders are left out."""
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10,
        pos_embed_max_size=8, qk_norm="rms_norm", dual_attention_layers=(0,),
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4, norm_num_groups=4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06,
        scaling_factor=1.5,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    StableDiffusion3Pipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, **dict.fromkeys(ABSENT)
    ).save_pretrained(folder)


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
        guidance: its guidance scale.
    """
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, **dict.fromkeys(ABSENT))
    # the sigmas given are final: its scheduler would shift them once more
    pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=1.0)
    pipe.set_progress_bar_config(disable=True)
    negative = {f"negative_{name}": value for name, value in (uncond or {}).items()}
    side = state["image"].shape[-1] * 2
    latents = pipe(
        **cond, **negative, latents=state["image"], sigmas=sigmas["image"], num_inference_steps=len(sigmas["image"]),
        guidance_scale=guidance, height=side, width=side, output_type="latent",
    ).images  # fmt: skip
    return {"image": latents}
