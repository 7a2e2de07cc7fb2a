"""LTX-2: video ``[B, C, F, H, W]`` and audio ``[B, C, L, M]`` in one transformer, time ``1000 sigma``, ``eps - x0``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from pdd.backbones.base import Backbone, Head, Perturbation, Size, State, at_least_float32, hooks, mode

if TYPE_CHECKING:
    from pdd.config import Guidance

FRAME_RATE = 24.0  # LTX2Pipeline's; it sets the positions in time and the length of the sound
WINDOW = 1024  # samples of the sound's spectrogram


class LTX2(Backbone):
    """Tokens pass through the transformer, one per video latent ``(C)`` and one per audio latent frame ``(C, M)``.

    A dataset's ``prompt_embeds`` are what the checkpoint's text connectors return, the video's and the audio's side by
    side ``[B, T, Cv + Ca]``, with the connectors' mask ``[B, T]``: the text encoder's own states, of all its layers,
    would be many times as large. Guidance has the pipeline's further two kinds: spatio-temporal, away from blocks whose
    self-attention passes its values on as they are, and cross-modal, away from a video and a sound that know nothing
    of each other.
    """

    encoders = ("text_encoder", "tokenizer", "connectors")
    max_sequence_length, padding_side = 1024, "left"
    frame_rate = FRAME_RATE
    heads = {"video": Head("proj_out"), "audio": Head("audio_proj_out")}
    columns = ("prompt_embeds", "prompt_attention_mask")
    lora_targets = "to_q,to_k,to_v,to_out.0,ff.net.0.proj,ff.net.2,audio_ff.net.0.proj,audio_ff.net.2"
    default = {"height": 512, "width": 768, "num_frames": 121}  # LTX2Pipeline's

    def __init__(self, configs: Mapping[str, Mapping[str, Any]], size: Size):
        super().__init__(configs, size)
        for name in ("patch_size", "patch_size_t", "audio_patch_size", "audio_patch_size_t"):
            if self.config[name] != 1:
                raise ValueError(f"transformer {name} is {self.config[name]}; allowed is 1")
        config = self.config
        self.widths = [config["caption_channels"]] * 2  # of the two prompt embeddings
        if not config["use_prompt_embeddings"]:  # from LTX-2.3 on the connectors make them as wide as the attention
            self.widths = [config["cross_attention_dim"], config["audio_cross_attention_dim"]]

    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        vae, audio = self.configs.get("vae", {}), self.configs.get("audio_vae", {})
        scaling = vae.get("spatio_temporal_scaling", [True] * 3)
        factor = 2 ** (len(vae["layers_per_block"]) - 1 if scaling is True else sum(scaling))
        space = vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * factor
        time = vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * factor
        wanted = {k: self.default[k] if v is None else v for k, v in vars(self.size).items()}
        for name in ("height", "width"):
            if wanted[name] <= 0 or wanted[name] % space:
                raise ValueError(f"{name} is {wanted[name]}; allowed are multiples of {space}")
        frames = wanted["num_frames"]
        if frames <= 0 or (frames - 1) % time:
            raise ValueError(f"num_frames is {frames}; allowed are 1, {1 + time}, {1 + 2 * time}, ...")
        # a second of sound is so many latent frames; the audio VAE compresses time and mel bins by 4
        per_second = audio.get("sample_rate", 16000) / audio.get("mel_hop_length", 160) / 4
        length, mel_bins = round(frames / FRAME_RATE * per_second), audio.get("mel_bins", 64) // 4
        sides = wanted["height"] // space, wanted["width"] // space
        return {
            "video": (self.config["in_channels"], (frames - 1) // time + 1, *sides),
            "audio": (audio.get("latent_channels", 8), length, mel_bins),
        }

    def shifts(self) -> dict[str, float]:
        """One shift for both: the pipeline steps the sound by a copy of the video's scheduler.

        With dynamic shifting it is ``exp(mu)``, mu linear in the number of video tokens. A ``shift_terminal`` is left
        out: no shift of a continuous clock stretches a pipeline's last sigma to one value whatever their number.
        """
        if not self.scheduler.get("use_dynamic_shifting"):
            return super().shifts()
        given = self.scheduler.get
        low, high = given("base_image_seq_len", 1024), given("max_image_seq_len", 4096)  # the pipeline's own defaults
        start, end = given("base_shift", 0.95), given("max_shift", 2.05)
        mu = start + (end - start) / (high - low) * (math.prod(self.latent_shapes()["video"][1:]) - low)
        return dict.fromkeys(self.heads, mu if given("time_shift_type") == "linear" else math.exp(mu))

    def tokens(self) -> dict[str, int]:
        # a token of sound holds all mel bins of its latent frame
        return super().tokens() | {"audio": self.latent_shapes()["audio"][1]}

    def encode_media(self, vaes: Mapping[str, Any], media: State) -> State:
        vae, audio_vae = vaes["vae"], vaes["audio_vae"]
        mean, std = (x.view(1, -1, 1, 1, 1).float() for x in (vae.latents_mean, vae.latents_std))
        video = (mode(vae, media["video"]) - mean) * vae.config.scaling_factor / std
        _, length, bins = self.latent_shapes()["audio"]
        latents = rearrange(mode(audio_vae, log_mel(media["audio"], audio_vae, length)), "b c l m -> b l (c m)")
        audio = (latents - audio_vae.latents_mean.float()) / audio_vae.latents_std.float()
        return {"video": video, "audio": rearrange(audio, "b l (c m) -> b c l m", m=bins)}

    def media_sound_rate(self, vaes: Mapping[str, Any]) -> int:
        return vaes["audio_vae"].config.sample_rate

    def check_prompt_length(self, tokens: int) -> None:
        super().check_prompt_length(tokens)
        for modality in ("video", "audio"):  # learned registers stand in the place of padding, all of them
            registers = self.configs.get("connectors", {}).get(f"{modality}_connector_num_learnable_registers")
            if registers and tokens % registers:
                raise ValueError(f"max_sequence_length is {tokens}; allowed are multiples of {registers}")

    def encode_prompts(self, pipe: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        states, mask, _, _ = pipe.encode_prompt(
            prompts, None, False, max_sequence_length=max_sequence_length, device=pipe.device
        )
        video, audio, mask = pipe.connectors(states, mask, padding_side=pipe.tokenizer.padding_side)
        return {"prompt_embeds": torch.cat([video, audio], -1), "prompt_attention_mask": mask}

    def perturbation(self, knob: str, knobs: Guidance) -> Perturbation:
        if knob == "modality_scale":
            return isolated
        if knob != "stg_scale":
            return super().perturbation(knob, knobs)
        if not self.config.get("perturbed_attn"):
            raise ValueError(f"stg_scale is {knobs.stg_scale}; allowed is 0, the transformer has perturbed_attn false")
        count = self.config["num_layers"]
        for block in knobs.spatio_temporal_guidance_blocks:
            if not 0 <= block < count:
                raise ValueError(f"spatio_temporal_guidance_blocks has {block}; allowed are 0 to {count - 1}")
        return partial(values_alone, knobs.spatio_temporal_guidance_blocks)

    def forward(
        self,
        transformer: nn.Module,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        directions: dict[str, int],
    ) -> State:
        dtype, video, audio = transformer.proj_out.weight.dtype, state["video"], state["audio"]
        frames, height, width = video.shape[2:]
        video_embeds, audio_embeds = cond["prompt_embeds"].to(dtype).split(self.widths, -1)
        mask = cond["prompt_attention_mask"].to(video.device)  # in a dry run masks alone are real
        time = {m: s * 1000 for m, s in sigma.items()}
        video_out, audio_out = transformer(
            hidden_states=rearrange(video, "b c f h w -> b (f h w) c").to(dtype),
            audio_hidden_states=rearrange(audio, "b c l m -> b l (c m)").to(dtype),
            encoder_hidden_states=video_embeds,
            audio_encoder_hidden_states=audio_embeds,
            timestep=time["video"],
            audio_timestep=time["audio"],
            sigma=time["video"],
            audio_sigma=time["audio"],
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            fps=FRAME_RATE,
            audio_num_frames=audio.shape[2],
            # which modality's time modulates the attention across: the other's since LTX-2.3. Nothing to a common clock
            use_cross_timestep=transformer.prompt_modulation,
            return_dict=False,
        )  # [B, F * H * W, D * C], [B, L, D * C * M]
        layout = "b (f h w) (d c) -> b d c f h w"
        out = rearrange(video_out, layout, d=directions["video"], f=frames, h=height, w=width)
        sound = rearrange(audio_out, "b l (d c m) -> b d c l m", d=directions["audio"], m=audio.shape[3])
        return {"video": at_least_float32(out), "audio": at_least_float32(sound)}

    def token_norm(self, velocity: State) -> State:
        axes = {"video": (1,), "audio": (1, 3)}
        return {m: torch.linalg.vector_norm(v, dim=axes[m], keepdim=True) for m, v in velocity.items()}

    def pipeline_arguments(self) -> dict[str, Any]:
        plain = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
        both = {f"{prefix}{name}": value for name, value in plain.items() for prefix in ("", "audio_")}
        return {**super().pipeline_arguments(), **both, "audio_guidance_scale": 1.0, "frame_rate": FRAME_RATE}

    def to_pipeline(self, state: State) -> dict[str, Any]:
        return {"latents": state["video"], "audio_latents": state["audio"]}

    def from_pipeline(self, latents: Any) -> State:
        # these are the VAEs' own, already denormalised; where their statistics are 0 and 1 there is no difference
        return {"video": latents[0], "audio": latents[1]}

    def sound_rate(self, pipe: Any) -> int:
        return pipe.vocoder.config.output_sampling_rate

    def fit_pipeline(self, pipe: Any) -> None:
        if pipe.connectors is None:  # then it is called with a dataset's rows
            pipe.connectors = Connected(self.widths)
        # it takes latents for the VAEs' and would normalise them; what a student starts from is noise
        pipe._normalize_latents = pipe._normalize_audio_latents = lambda latents, *_: latents


def log_mel(sound: Tensor, audio_vae: Any, length: int) -> Tensor:
    """The spectrogram ``[B, C, T, M]`` that the audio autoencoder takes, of sound ``[B, C, S]`` at its sample rate.

    Magnitudes in Slaney's mel bins, as the LTX-2 release makes them: windows of 1024 samples, logarithm above 1e-5. Sound
    is cut, or filled with silence, to what becomes ``length`` latent frames.
    """
    config = audio_vae.config
    rate, hop, bins = config.sample_rate, config.mel_hop_length, config.mel_bins
    samples = (length * audio_vae.temporal_compression_ratio - 1) * hop  # a spectrogram has a frame more than hops
    sound = nn.functional.pad(sound[..., :samples], (0, max(samples - sound.shape[-1], 0)))
    filters = mel_filter_bank(WINDOW // 2 + 1, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    mels = [
        spectrogram(
            channel, window_function(WINDOW, "hann"), WINDOW, hop, power=1.0, mel_filters=filters, mel_floor=1e-5,
            log_mel="log",
        )
        for channel in sound.flatten(0, 1).numpy()
    ]  # fmt: skip
    return rearrange(torch.from_numpy(np.stack(mels)), "(b c) m t -> b c t m", b=len(sound))


def isolated(transformer: nn.Module, samples: Tensor) -> AbstractContextManager:
    """Samples whose modalities do not attend to each other: the pipeline's ``isolate_modalities``."""

    def nothing(attention: nn.Module, args: tuple, out: Tensor) -> Tensor:
        return out.masked_fill(samples.to(out.device).view(-1, 1, 1), 0)

    return hooks(*(
        attention.register_forward_hook(nothing)
        for block in transformer.transformer_blocks for attention in (block.audio_to_video_attn, block.video_to_audio_attn)
    ))  # fmt: skip


def values_alone(blocks: list[int], transformer: nn.Module, samples: Tensor) -> AbstractContextManager:
    """Samples whose self-attention in these blocks is its values: the pipeline's ``spatio_temporal_guidance_blocks``."""

    def perturb(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kept = (~samples).to(kwargs["hidden_states"]).view(-1, 1, 1)
        return args, {**kwargs, "perturbation_mask": kept, "all_perturbed": False}

    chosen = (transformer.transformer_blocks[block] for block in blocks)
    return hooks(*(block.register_forward_pre_hook(perturb, with_kwargs=True) for block in chosen))


class Connected:
    """In the place of the text connectors: takes their outputs side by side ``[B, T, Cv + Ca]`` and gives them back."""

    def __init__(self, widths: list[int]):
        self.widths = widths

    def __call__(self, prompt_embeds: Tensor, mask: Tensor, padding_side: str = "left") -> tuple[Tensor, ...]:
        return *prompt_embeds.split(self.widths, -1), mask
