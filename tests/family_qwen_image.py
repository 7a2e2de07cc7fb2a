"""A tiny random Qwen-Image checkpoint, and its stock pipeline's own trajectory."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from pdd.backbones import Size

ABSENT = ["text_encoder", "tokenizer"]
RESCALED = True  # the pipeline gives every guided token the norm of the conditional one
SIZE = Size(height=16, width=24)


def build(folder: Path, **changes) -> None:
    """Save the pipeline as Diffusers does; its text encoder is left out."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(**{
        "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 12, "axes_dims_rope": (2, 2, 4), **changes,
    })  # fmt: skip
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 1.1, 1.2, 1.3],
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    QwenImagePipeline(transformer=transformer, vae=vae, scheduler=scheduler, **dict.fromkeys(ABSENT)).save_pretrained(
        folder
    )


def conditioning(batch: int, seed: int) -> dict[str, torch.Tensor]:
    """Random conditioning, every column ``[B, ...]``; texts of several lengths, padded with noise."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, 7, dtype=torch.int64)
    for i in range(batch):
        mask[i, 7 - (3 * seed + i) % 5 :] = 0  # lengths 4 and 3 for seed 1, 5 for seed 9
    return {"prompt_embeds": torch.randn(batch, 7, 12, generator=g), "prompt_embeds_mask": mask}


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
        guidance: its true guidance scale.
    """
    pipe = QwenImagePipeline.from_pretrained(folder, **dict.fromkeys(ABSENT))
    # the sigmas given are final: its scheduler would shift and stretch them once more
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
    return {"image": pipe._unpack_latents(tokens, height, width, pipe.vae_scale_factor)[:, :, 0]}
