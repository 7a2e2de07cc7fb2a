"""A tiny random MiniMax-H3 checkpoint, and its stock pipeline's own trajectory."""

from functools import wraps
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
    ModularPipeline,
)
from diffusers.modular_pipelines import MiniMaxH3Blocks
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

from pdd.backbones import Size

SIZE = Size(height=24, width=32, num_frames=124)  # 6 x 8 latents, 37 of them in time, and 2 x 207 of sound
PATCH = (1, 3, 2)  # two different sides, so that they cannot be exchanged (the published ones are 2)
TEXT = 12  # width of the prompt embedding
SOUND_RATE = 8000  # samples per second
TOKENS = {"video": "proj_in", "audio": "audio_proj_in"}  # linears that see a modality's rows; the heads see all
OWN_CLOCKS = True  # the pipeline steps each modality by a scheduler of its own


def build(folder: Path, **components: Any) -> None:
    """Save the modular pipeline as Diffusers does; its text encoder is left out unless it is given."""
    torch.manual_seed(0)
    transformer = MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=1, ffn_dim=32,
        in_channels=4, audio_in_channels=8, patch_size=PATCH, text_dim=TEXT, freq_dim=16, time_embed_hidden_dim=16,
        time_embed_dim=16, rope_freq_dim=2,
    )  # fmt: skip
    with torch.no_grad():  # as initialised its outputs hardly depend on the other rows
        for name, p in transformer.named_parameters():
            if "to_out" in name or "adaln" in name or "context" in name:
                p.mul_(3)
    vae = AutoencoderKLMiniMaxH3(
        latent_channels=4, block_out_channels=(8, 8), layers_per_block=1, spatial_downsample_factors=(2, 2),
        temporal_downsample_factors=(2, 2), norm_num_groups=4, decoder_num_layers=1, decoder_num_attention_heads=2,
        decoder_attention_head_dim=8, decoder_num_register_tokens=2, decoder_ffn_mult=2, latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.8, 1.1, 0.6],
    )  # fmt: skip
    audio_vae = AutoencoderKLMiniMaxH3Audio(  # 40 latents a second, as the published one
        encoder_dim=8, encoder_rates=(10, 20), latent_dim=16, latent_channels=8, num_attention_heads=2, decoder_dim=16,
        decoder_rates=(20, 10), decoder_kernel_sizes=(40, 20), resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),), sampling_rate=SOUND_RATE, latents_mean=[0.1 * i for i in range(8)],
        latents_std=[1 + 0.1 * i for i in range(8)],
    )  # fmt: skip
    pipe = MiniMaxH3Blocks().init_pipeline()
    pipe.update_components(
        transformer=transformer, vae=vae, audio_vae=audio_vae, scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0), **components,
    )  # fmt: skip
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)


def conditioning(batch: int, seed: int) -> dict[str, torch.Tensor]:
    """Random conditioning, every column ``[B, ...]``; texts of several lengths, padded with noise."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, 7, dtype=torch.int64)
    for i in range(batch):
        mask[i, 7 - (seed - 1 + i) % 5 :] = 0  # lengths 7 and 6 for seed 1, 4 for seed 9
    return {"prompt_embeds": torch.randn(batch, 7, TEXT, generator=g), "prompt_embeds_mask": mask}


class Given(MiniMaxH3Scheduler):
    """The stock scheduler at given noise levels."""

    def __init__(self, given: list[float]):
        super().__init__()
        self.given = [*given, 0.0]

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None):
        super().set_timesteps(sigmas=self.given, device=device)


class Guided(MiniMaxH3Transformer3DModel):
    """In the place of the pipeline's transformer, which is guidance-distilled: two calls of it, the second packed anew.

    Where the unconditional text has another length, all positions change; the pipeline's own block says how.
    """

    uncond: torch.Tensor
    scale: float
    geometry: tuple

    @wraps(MiniMaxH3Transformer3DModel.forward)  # the pipeline asks which arguments it takes
    def forward(self, **conditional):
        names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
        tags = torch.ones(self.uncond.shape[1], dtype=torch.long)
        packed = dict(zip(names, MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *self.geometry)))
        times = conditional["timestep_indices"]
        indices = torch.full((len(packed["token_tags"]),), int(times[conditional["video_indices"][0]]))
        indices[packed["audio_indices"]] = times[conditional["audio_indices"][0]]
        packed |= {"timestep_indices": indices, "encoder_hidden_states": self.uncond}
        calls = [super(Guided, self).forward(**arguments) for arguments in (conditional, {**conditional, **packed})]
        return tuple(u + self.scale * (c - u) for c, u in zip(*calls))


def whole(folder: Path, state: dict[str, torch.Tensor], cond: dict[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    """The stock pipeline without its text encoder, and its arguments for one sample's start."""
    workflow = ModularPipeline.from_pretrained(str(folder)).blocks.get_workflow("t2va")
    workflow.sub_blocks.pop("text_encoder")
    pipe = workflow.init_pipeline(str(folder))
    pipe.load_components(dtype=torch.float32)
    text = cond["prompt_embeds"][:, : cond["prompt_embeds_mask"].sum()]
    return pipe, {
        "prompt_embeds": text, "text_token_tags": torch.full((text.shape[1],), pipe.text_tag),
        "latents": state["video"], "audio_latents": state["audio"][0], "num_inference_steps": 2,
        "output_type": "pt", **vars(SIZE),
    }  # fmt: skip


def taken(vaes: dict[str, Any], media: dict[str, torch.Tensor], shapes: dict[str, tuple]) -> dict[str, torch.Tensor]:
    """What the autoencoders take of one sample's video, and of its sound, long enough: each channel is a sample."""
    pipe, samples = MiniMaxH3Blocks().init_pipeline(), shapes["audio"][2] * vaes["audio_vae"].hop_length
    mean, std = (torch.tensor(values).view(1, 3, 1, 1, 1) for values in (pipe.pixel_mean, pipe.pixel_std))
    return {"vae": (media["video"] / 2 + 0.5 - mean) / std, "audio_vae": media["audio"][0, :, None, :samples]}


def stock(
    folder: Path,
    state: dict[str, torch.Tensor],
    sigmas: dict[str, list[float]],
    cond: dict[str, torch.Tensor],
    uncond: dict[str, torch.Tensor] | None = None,
    guidance: float = 1.0,
) -> dict[str, torch.Tensor]:
    """The stock pipeline's last latents, in this project's layout; it makes one sample a call.

    Args:
        state: what the pipeline starts from.
        sigmas: modality -> noise levels of its steps, the final 0 left out.
        cond, uncond: conditional and unconditional columns.
        guidance: a scale that it does not have itself.
    """
    workflow = ModularPipeline.from_pretrained(str(folder)).blocks.get_workflow("t2va")
    for name in [name for name in workflow.sub_blocks if name.startswith(("text_encoder", "decode"))]:
        workflow.sub_blocks.pop(name)
    pipe = workflow.init_pipeline(str(folder))
    pipe.load_components(dtype=torch.float32)
    # asked for their geometry; without the blocks that decode they are none of the pipeline's components
    pipe.vae = AutoencoderKLMiniMaxH3.from_pretrained(folder / "vae")
    pipe.audio_vae = AutoencoderKLMiniMaxH3Audio.from_pretrained(folder / "audio_vae")
    pipe.update_components(scheduler=Given(sigmas["video"]), audio_scheduler=Given(sigmas["audio"]))
    pipe.set_progress_bar_config(disable=True)
    if guidance != 1:
        pipe.update_components(transformer=Guided.from_pretrained(folder / "transformer"))
    made = []
    for i in range(len(state["video"])):
        texts = [c["prompt_embeds"][i : i + 1, : c["prompt_embeds_mask"][i].sum()] for c in (cond, uncond or cond)]
        shape = (*state["video"].shape[2:], state["audio"].shape[3], PATCH, 2, pipe.audio_tag, pipe.video_tag)
        pipe.transformer.uncond, pipe.transformer.scale, pipe.transformer.geometry = texts[1], guidance, shape
        made.append(pipe(
            prompt_embeds=texts[0], text_token_tags=torch.full((texts[0].shape[1],), pipe.text_tag),
            latents=state["video"][i : i + 1], audio_latents=state["audio"][i], num_inference_steps=99, **vars(SIZE),
            output=["latents", "audio_latents"],
        ))  # fmt: skip
    return {
        "video": torch.cat([m["latents"] for m in made]),
        "audio": torch.stack([m["audio_latents"] for m in made]),
    }
