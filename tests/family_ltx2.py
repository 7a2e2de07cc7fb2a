"""A tiny random LTX-2 checkpoint, and its stock pipeline's own trajectory."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)  # fmt: skip
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

from pdd.backbones import Size
from pdd.backbones.ltx2 import log_mel

ABSENT = ["text_encoder", "tokenizer"]
SIZE = Size(height=64, width=96, num_frames=17)  # 2 x 3 latents, 3 of them in time
VIDEO, AUDIO = 24, 16  # widths of the two prompt embeddings
VERSIONS = {
    # 2.0 modulates the attention across by a modality's own time and projects the prompt inside the transformer
    "2.0": dict(use_prompt_embeddings=True, caption_channels=VIDEO),
    "2.3": dict(use_prompt_embeddings=False, caption_channels=10, gated_attn=True, cross_attn_mod=True,
                audio_gated_attn=True, audio_cross_attn_mod=True, perturbed_attn=True),
}  # fmt: skip


def build(folder: Path, version: str = "2.3", registers: int | None = None) -> None:
    """Save the pipeline as Diffusers does; its text encoder is left out."""
    torch.manual_seed(0)
    transformer = LTX2VideoTransformer3DModel(
        in_channels=6, out_channels=6, num_attention_heads=2, attention_head_dim=VIDEO // 2, cross_attention_dim=VIDEO,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=AUDIO // 2,
        audio_cross_attention_dim=AUDIO, audio_hop_length=640, num_layers=2, rope_type="split", **VERSIONS[version],
    )  # fmt: skip
    with torch.no_grad():  # as initialised the two modalities hardly see the prompt or each other
        for name, p in transformer.named_parameters():
            if "table" in name or "to_out" in name or "scale_shift" in name:
                p.mul_(3)
    vae = AutoencoderKLLTX2Video(
        latent_channels=6, block_out_channels=(8,) * 4, decoder_block_out_channels=(8, 16, 32), layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4, spatial_compression_ratio=32, temporal_compression_ratio=8,
    )  # fmt: skip
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_hop_length=640, mel_bins=16
    )
    connectors = LTX2TextConnectors(
        caption_channels=10, text_proj_in_factor=2, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=VIDEO // 2, video_connector_num_layers=1,
        video_connector_num_learnable_registers=registers, audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=AUDIO // 2, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=registers, per_modality_projections=True, video_hidden_dim=VIDEO,
        audio_hidden_dim=AUDIO,
    )  # fmt: skip
    vocoder = LTX2Vocoder(in_channels=32, hidden_channels=32)
    LTX2Pipeline(
        transformer=transformer, vae=vae, audio_vae=audio_vae, connectors=connectors, vocoder=vocoder,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0), **dict.fromkeys(ABSENT),
    ).save_pretrained(folder)  # fmt: skip


def conditioning(batch: int, seed: int, width: int = VIDEO + AUDIO) -> dict[str, torch.Tensor]:
    """Random conditioning, every column as the dataset holds it ``[B, ...]``; some tokens are masked."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, 7, dtype=torch.int64)
    mask[-1, 4:] = 0
    return {"prompt_embeds": 3 * torch.randn(batch, 7, width, generator=g), "prompt_attention_mask": mask}


class Given(FlowMatchEulerDiscreteScheduler):
    """Euler at given noise levels; the copy that the pipeline makes for the sound has the sound's."""

    given: dict[str, list[float]]
    modality = "video"

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
        super().set_timesteps(device=device, sigmas=self.given[self.modality])

    def __deepcopy__(self, memo):
        other = Given(shift=1.0)
        other.given, other.modality = self.given, "audio"
        return other


class Split:
    """In the place of the connectors, whose outputs the dataset holds."""

    widths = [VIDEO, AUDIO]

    def __call__(self, prompt_embeds, mask, padding_side):
        return *prompt_embeds.split(self.widths, -1), mask


def taken(vaes: dict[str, Any], media: dict[str, torch.Tensor], shapes: dict[str, tuple]) -> dict[str, torch.Tensor]:
    """What the autoencoders take of a video and its sound."""
    return {"vae": media["video"], "audio_vae": log_mel(media["audio"], vaes["audio_vae"], shapes["audio"][1])}


def stock(
    folder: Path,
    state: dict[str, torch.Tensor],
    sigmas: dict[str, list[float]],
    cond: dict[str, torch.Tensor],
    uncond: dict[str, torch.Tensor] | None = None,
    guidance: float = 1.0,
    connectors: Any = None,
    **more: Any,
) -> dict[str, torch.Tensor]:
    """The stock pipeline's last latents, in this project's layout.

    Args:
        state: what the pipeline starts from.
        sigmas: modality -> noise levels of its steps, the final 0 left out.
        cond, uncond: conditional and unconditional columns.
        guidance: its guidance scale, of both modalities.
        connectors: in the place of :class:`Split`.
        more: arguments of the pipeline, such as further kinds of guidance.
    """
    pipe = LTX2Pipeline.from_pretrained(folder, **dict.fromkeys(ABSENT))
    pipe.connectors = connectors or Split()
    pipe.scheduler = Given(shift=1.0)  # the sigmas given are final
    pipe.scheduler.given = sigmas
    pipe.set_progress_bar_config(disable=True)

    def audio_time(transformer, args, kwargs):
        # the pipeline feeds the video's time to both modalities, which is right where they share a clock
        sigma = sigmas["audio"][pipe.scheduler.step_index or 0]
        time = torch.full_like(kwargs["timestep"], sigma * 1000)
        return args, {**kwargs, "audio_timestep": time, "audio_sigma": time}

    if sigmas["audio"] != sigmas["video"]:
        pipe.transformer.register_forward_pre_hook(audio_time, with_kwargs=True)
    negative = {f"negative_{name}": value for name, value in (uncond or {}).items()}
    scales = {"guidance_scale": guidance, "stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
    scales |= {f"audio_{name}": value for name, value in scales.items()}
    out = pipe(
        **cond, **negative, **scales | more, latents=state["video"], audio_latents=state["audio"], **vars(SIZE),
        num_inference_steps=len(sigmas["video"]), output_type="latent",
    )  # fmt: skip
    return {"video": out.frames, "audio": out.audio}
