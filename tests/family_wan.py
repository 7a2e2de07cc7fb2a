"""A tiny random Wan text-to-video checkpoint, and its stock pipeline's own trajectory."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

from pdd.backbones import Size

ABSENT = ["text_encoder", "tokenizer"]
SIZE = Size(height=48, width=64, num_frames=13)  # 6 x 8 latents, 4 of them in time
PATCH = (2, 3, 2)  # three different sides, so that no two can be exchanged (the published ones are 1, 2, 2)


def build(folder: Path, patch: tuple[int, ...] = PATCH, boundary: float | None = None, **pipeline) -> None:
    """Save the pipeline as Diffusers does; its text encoder is left out. With a ``boundary`` it has two experts."""
    torch.manual_seed(0)
    shape = dict(
        patch_size=patch, num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=12,
        freq_dim=16, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    transformer = WanTransformer3DModel(**shape, ffn_dim=32)
    if boundary is not None:  # of another width, so that the one's weights do not fit the other
        pipeline |= {"transformer_2": WanTransformer3DModel(**shape, ffn_dim=40), "boundary_ratio": boundary}
    autoencoder = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.1] * 4, latents_std=[1.5] * 4
    )  # fmt: skip
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    WanPipeline(
        transformer=transformer, vae=autoencoder, scheduler=scheduler, **dict.fromkeys(ABSENT), **pipeline
    ).save_pretrained(folder)


def conditioning(batch: int, seed: int) -> dict[str, torch.Tensor]:
    """Random conditioning, every column as the dataset holds it ``[B, ...]``."""
    g = torch.Generator().manual_seed(seed)
    return {"prompt_embeds": torch.randn(batch, 7, 12, generator=g)}


class Given(FlowMatchEulerDiscreteScheduler):
    """Euler at given noise levels, whatever number of steps the pipeline asks for: it takes no sigmas itself."""

    given: list[float]

    def set_timesteps(self, num_inference_steps=None, device=None):
        super().set_timesteps(device=device, sigmas=self.given)


def stock(
    folder: Path,
    state: dict[str, torch.Tensor],
    sigmas: dict[str, list[float]],
    cond: dict[str, torch.Tensor],
    uncond: dict[str, torch.Tensor] | None = None,
    guidance: float = 1.0,
    guidance_2: float | None = None,
    after: int | None = None,
) -> dict[str, torch.Tensor]:
    """The stock pipeline's last latents, in this project's layout.

    Args:
        state: what the pipeline starts from.
        sigmas: modality -> noise levels of its steps, the final 0 left out.
        cond, uncond: conditional and unconditional columns.
        guidance, guidance_2: its guidance scale, and that of the second expert.
        after: the latents after so many steps, in the place of the last ones.
    """
    pipe = WanPipeline.from_pretrained(folder, **dict.fromkeys(ABSENT))
    # the published scheduler, UniPC, is of second order; the sigmas given are final
    pipe.scheduler = Given(shift=1.0)
    pipe.scheduler.given = sigmas["video"]
    pipe.set_progress_bar_config(disable=True)
    negative = {f"negative_{name}": value for name, value in (uncond or {}).items()}
    seen = []
    latents = pipe(
        **cond, **negative, latents=state["video"], num_inference_steps=len(sigmas["video"]), guidance_scale=guidance,
        guidance_scale_2=guidance_2, output_type="latent", **vars(SIZE),
        callback_on_step_end=lambda pipe, step, time, there: seen.append(there["latents"]) or {},
    ).frames  # fmt: skip
    return {"video": latents if after is None else seen[after - 1]}
