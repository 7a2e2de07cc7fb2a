"""MiniMax-H3: video ``[B, C, F, H, W]`` and stereo sound ``[B, 2, C, L]`` in one sequence, time ``1 - sigma``, ``x0 - eps``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.utils.torch_utils import randn_tensor
from einops import rearrange
from torch import Tensor, nn

from pdd.backbones.base import Backbone, Head, Size, State, at_least_float32, patch_norm, standardized, unrounded

FRAME_RATE = 24.0  # the pipeline's only one
SECONDS = (5, 15)  # shortest and longest video that it makes
SOUND_RATE = 40  # sound latents per second
VIDEO, TEXT, SOUND = range(3)  # tags by which the transformer modulates a row

# a latent frame's time on the rotary axis, where a sound latent's is 1: the video VAE makes 17 frames 5 latents, the first
# of them one frame, each other one four
FRAME_TIMES = [SOUND_RATE / FRAME_RATE * frames for frames in (1, 4, 4, 4, 4)]
CANVAS = 32.0  # length of the rotary axes of a square picture
# the video VAE takes colours in 0..1 by the mean and deviation of ImageNet's, which no configuration of it says
COLOUR_MEAN, COLOUR_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class MiniMaxH3(Backbone):
    """Text to video with sound, by the checkpoint's ``transformer``; first and last frames and references are not fed.

    Tokens pass through the transformer: ``(C, pt, ph, pw)`` of the video, ``(C)`` of the sound, left channel before right.
    Text comes before both in the sequence and shifts their times, so padding may not be there, and neither may a second
    sample: every sample has a forward of its own. A dataset's ``prompt_embeds`` are the text encoder's states after its 50th
    layer ``[B, T, E]``, with a mask ``[B, T]`` of what is not padding; its latents are normalised by the VAEs' statistics. An
    empty prompt has no tokens at all; a space stands for it. The published checkpoints are guidance-distilled, which no
    configuration of theirs says.
    """

    frame_rate = FRAME_RATE
    heads = {"video": Head("proj_out"), "audio": Head("audio_proj_out")}
    columns = ("prompt_embeds", "prompt_embeds_mask")
    blocks = "transformer_blocks"
    batched = False
    default = {"height": 768, "width": 1344, "num_frames": 124}  # its pipeline's

    def __init__(self, configs: Mapping[str, Mapping[str, Any]], size: Size):
        super().__init__(configs, size)
        self.patch = tuple(self.config["patch_size"])
        if self.patch[0] != 1:
            raise ValueError(f"transformer patch_size is {self.patch}; allowed are those of 1 in time")

    def shifts(self) -> dict[str, float]:
        """Each modality has a scheduler of its own; 12 and 3 are the published ones' and its pipeline's."""
        schedulers = {"video": self.scheduler, "audio": self.configs.get("audio_scheduler", {})}
        published = {"video": 12.0, "audio": 3.0}
        return {m: float(config.get("shift", published[m])) for m, config in schedulers.items()}

    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        vae = self.configs.get("vae", {})
        wanted = {k: self.default[k] if v is None else v for k, v in vars(self.size).items()}
        space = math.prod(vae.get("spatial_downsample_factors", (16,)))
        sides = []
        for name, patch in zip(("height", "width"), self.patch[1:]):
            pixels, unit = wanted[name], space * patch
            if pixels <= 0 or pixels % unit:
                raise ValueError(f"{name} is {pixels}; allowed are multiples of {unit}")
            sides.append(pixels // space)
        # the VAE takes clips of 17 frames to 5 latents each, and 5 more frames to 2
        clip, time = vae.get("clip_length", 17), math.prod(vae.get("temporal_downsample_factors", (4,)))
        tokens, frames = -(-clip // time), wanted["num_frames"]
        lengths = [n for n in range(tokens, int(SECONDS[1] * FRAME_RATE) + 1, clip) if n >= SECONDS[0] * FRAME_RATE]
        if frames not in lengths:
            raise ValueError(f"num_frames is {frames}; allowed are {lengths[0]}, {lengths[1]}, ... {lengths[-1]}")
        return {
            "video": (self.config["in_channels"], (frames - tokens) // clip * tokens + 2, *sides),
            "audio": (2, self.config["audio_in_channels"], round(frames / FRAME_RATE * SOUND_RATE)),
        }

    def tokens(self) -> dict[str, int]:
        shapes = self.latent_shapes()
        channels, _, length = shapes["audio"]
        return {"video": math.prod(shapes["video"][1:]) // math.prod(self.patch), "audio": channels * length}

    def encode_media(self, vaes: Mapping[str, Any], media: State) -> State:
        mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (COLOUR_MEAN, COLOUR_STD))
        samples = self.latent_shapes()["audio"][2] * vaes["audio_vae"].hop_length
        sound = nn.functional.pad(media["audio"], (0, samples - media["audio"].shape[-1]))  # by less than none: cut
        latents = standardized(vaes["audio_vae"], rearrange(sound, "b s t -> (b s) 1 t"))  # a VAE of one channel
        video = standardized(vaes["vae"], ((media["video"] + 1) / 2 - mean) / std)
        return {"video": video, "audio": rearrange(latents, "(b s) c l -> b s c l", s=2)}

    def media_sound_rate(self, vaes: Mapping[str, Any]) -> int:
        return vaes["audio_vae"].config.sampling_rate

    def forward(
        self,
        transformer: nn.Module,
        state: State,
        sigma: dict[str, Tensor],
        cond: dict[str, Tensor],
        directions: dict[str, int],
    ) -> State:
        video, audio = state["video"], state["audio"]  # of one sample: [1, C, F, H, W], [1, 2, C, L]
        text = cond["prompt_embeds"].index_select(1, self._text_rows(cond["prompt_embeds_mask"]).to(video.device))
        (frames, *sides), (_, p, q) = video.shape[2:], self.patch
        layout = pack(text.shape[1], audio.shape[3], frames, sides, (p, q))
        tags, rows = layout.tags.to(video.device), {tag: r.to(video.device) for tag, r in layout.rows.items()}
        times = 1 - torch.cat([sigma["video"], sigma["audio"]])  # [2]
        video_in = rearrange(video, "b c f (h p) (w q) -> b (f h w) (c p q)", p=p, q=q)
        audio_in = rearrange(audio, "b s c l -> b (s l) c")
        with (
            unrounded(transformer.proj_in, video_in),
            unrounded(transformer.audio_proj_in, audio_in),
            unrounded(transformer.time_embedder, transformer.time_proj(times)),
        ):
            video_out, audio_out = transformer(
                hidden_states=video_in,
                audio_hidden_states=audio_in,
                encoder_hidden_states=text,
                timestep=times,
                timestep_indices=(tags == SOUND).long(),  # text goes by the video's time
                token_tags=tags,
                position_ids=layout.positions.to(video.device),
                text_indices=rows[TEXT],
                audio_indices=rows[SOUND],
                video_indices=rows[VIDEO],
                return_dict=False,
            )  # [1, F * H/p * W/q, D * C * p * q], [1, 2 * L, D * C]
        parts = {"d": directions["video"], "f": frames, "h": sides[0] // p, "p": p, "q": q}
        out = rearrange(video_out, "b (f h w) (d c p q) -> b d c f (h p) (w q)", **parts)
        sound = rearrange(audio_out, "b (s l) (d c) -> b d s c l", d=directions["audio"], s=2)
        return {"video": -at_least_float32(out), "audio": -at_least_float32(sound)}

    @staticmethod
    def _text_rows(mask: Tensor) -> Tensor:
        """Rows of one sample's text ``[1, T]`` that are no padding; the first one where nothing is text (``zeros``)."""
        rows = mask[0].nonzero()[:, 0]
        return rows if len(rows) else rows.new_zeros(1)

    def token_norm(self, velocity: State) -> State:
        audio = torch.linalg.vector_norm(velocity["audio"], dim=2, keepdim=True)
        return {"video": patch_norm(velocity["video"], self.patch), "audio": audio}

    def encode_prompts(self, pipe: Any, prompts: list[str], max_sequence_length: int) -> dict[str, Tensor]:
        """A prompt longer than ``max_sequence_length`` tokens is refused: its pipeline cuts none."""
        from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

        length, embeds = max_sequence_length, []
        mask = torch.zeros(len(prompts), length, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            tokens = pipe.tokenizer(prompt or " ", add_special_tokens=False)["input_ids"]
            if len(tokens) > length:
                raise ValueError(f"max_sequence_length is {length}; prompt {prompt[:40]!r}... has {len(tokens)} tokens")
            states = get_qwen3vl_prompt_embeds(
                pipe.text_encoder, WordsAlone, tokens, device=pipe.device, dtype=pipe.text_encoder.dtype
            )  # [1, tokens, E]
            embeds.append(nn.functional.pad(states, (0, 0, 0, length - len(tokens))))
            mask[i, : len(tokens)] = 1
        return {"prompt_embeds": torch.cat(embeds), "prompt_embeds_mask": mask}

    def modular_pipeline(self, student: Any, parts: dict[str, Any], force: bool) -> OneByOne:
        return OneByOne(student, parts, force)

    def to_pipeline(self, state: State) -> dict[str, Any]:
        return {"latents": state["video"], "audio_latents": state["audio"]}

    def from_pipeline(self, latents: Any) -> State:
        return {"video": latents[0], "audio": latents[1]}

    def sound_rate(self, pipe: Any) -> int:
        return pipe.audio_vae.config.sampling_rate


class WordsAlone:
    """In the place of the text encoder's processor, asked only which tokens are pictures; it needs a package for them."""

    @staticmethod
    def create_mm_token_type_ids(prompts: list[list[int]]) -> list[list[int]]:
        return [[0] * len(tokens) for tokens in prompts]


class Layout(NamedTuple):
    """The packed sequence of one sample.

    Attributes:
        positions: ``[S, 3]``, rotary coordinates in time, height and width, float32.
        tags: ``[S]``, which modality a row is of.
        rows: tag -> its rows.
    """

    positions: Tensor
    tags: Tensor
    rows: dict[int, Tensor]


def pack(text: int, sounds: int, frames: int, sides: tuple[int, int], patch: tuple[int, int]) -> Layout:
    """Text, left sound, right sound, video.

    Args:
        text: rows of text.
        sounds: sound latents of each channel.
        frames, sides: video latents in time, and in height and width.
        patch: latents that a token spans in height and width.
    """
    area, axes = math.prod(sides) ** 0.5, []
    for side, p in zip(sides, patch):  # pictures of any shape have one area and one middle
        extent, tokens = side / area, side // p
        axes.append(CANVAS * ((1 - extent) / 2 + extent * torch.arange(tokens, dtype=torch.float64) / tokens))
    durations = torch.tensor([FRAME_TIMES[i % len(FRAME_TIMES)] for i in range(frames)], dtype=torch.float64)
    one = torch.zeros(1, dtype=torch.float64)
    # each block is every combination of its times, heights and widths, times first
    blocks = {
        TEXT: [(_count(text), one, one)],
        SOUND: [(text + _count(sounds), one, axes[1][edge].view(1)) for edge in (0, -1)],
        VIDEO: [(text + durations.cumsum(0) - durations, *axes)],
    }
    grids = {tag: torch.cat([torch.cartesian_prod(*block) for block in parts]) for tag, parts in blocks.items()}
    tags = torch.cat([torch.full((len(grid),), tag) for tag, grid in grids.items()])
    rows = {tag: (tags == tag).nonzero()[:, 0] for tag in grids}
    return Layout(torch.cat(list(grids.values())).float(), tags, rows)


def _count(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------- students in the stock pipeline


class BlockScheduler(MiniMaxH3Scheduler):
    """The stock scheduler of one modality over the blocks of a student's partition; so many steps are so many forwards."""

    student: Any
    modality: str
    force: bool

    @classmethod
    def of(cls, student: Any, modality: str, force: bool) -> BlockScheduler:
        scheduler = cls(shift=student.grid.schedules[modality].shift)
        scheduler.student, scheduler.modality, scheduler.force = student, modality, force
        return scheduler

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        """Place the steps at the student's partition into so many blocks.

        Raises:
            ValueError: a block would be wider than trained.
        """
        nodes = self.student.nodes(num_inference_steps, self.force)
        self.blocks = list(zip(nodes, nodes[1:]))
        super().set_timesteps(sigmas=self.student.grid.sigma[self.modality][nodes], device=device)


class Made(NamedTuple):
    """What :class:`OneByOne` returns: videos, or video latents, and sounds ``[B, 2, samples]``, or sound latents."""

    frames: Any
    audio: Tensor


class OneByOne:
    """A student's stock pipeline, called as those of other families are: a batch in, a batch out.

    Diffusers has this family's pipeline as modular blocks only, which make one sample a call. Each modality is stepped by
    its own scheduler. Without a ``vae`` in the checkpoint there are latents only (``output_type="latent"``).

    Args:
        student: a :class:`pdd.formats.LoadedStudent`.
        parts: ``vae`` and ``audio_vae``, ``text_encoder`` and ``tokenizer``, as far as they are there.
        force: allow blocks wider than trained.
    """

    finished = False  # the latents that it is given are the end of a walk: it only decodes them

    def __init__(self, student: Any, parts: dict[str, Any], force: bool):
        from diffusers.modular_pipelines.minimax_h3 import modular_blocks_minimax_h3 as blocks

        self.student, self.backbone, self.dtype = student, student.backbone, student.transformer.dtype
        self.vae, self.audio_vae, self.text_encoder, self.tokenizer = (
            parts.get(name) for name in ("vae", "audio_vae", "text_encoder", "tokenizer")
        )
        self.scheduler = BlockScheduler.of(student, "video", force)
        self.denoise = blocks.MiniMaxH3CoreDenoiseStep().init_pipeline()
        self.denoise.update_components(
            transformer=student.transformer,
            scheduler=self.scheduler,
            audio_scheduler=BlockScheduler.of(student, "audio", force),
        )
        self.denoise.vae, self.denoise.audio_vae = self.vae, self.audio_vae  # asked for their geometry alone
        self.decode = blocks.MiniMaxH3DecodeStep().init_pipeline()
        self.decode.update_components(vae=self.vae, audio_vae=self.audio_vae)

    @property
    def transformer(self) -> nn.Module:
        return self.student.transformer

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    def to(self, device: Any) -> OneByOne:
        for component in (self.student.transformer, self.vae, self.audio_vae, self.text_encoder):
            if component is not None:
                component.to(device)
        return self

    def set_progress_bar_config(self, **options: Any) -> None:
        self.denoise.set_progress_bar_config(**options)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        prompt_embeds: Tensor | None = None,
        prompt_embeds_mask: Tensor | None = None,
        latents: Tensor | None = None,
        audio_latents: Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int = 8,
        guidance_scale: float = 1.0,
        generator: torch.Generator | None = None,
        output_type: str = "pt",
    ) -> Made:
        """Videos with sound of prompts, or of a dataset's columns.

        Args:
            latents, audio_latents: states at the grid's start; drawn if not given.
            height, width, num_frames: the sizes that the student was trained at if not given.
            num_inference_steps: forwards.
            output_type: ``pt`` (frames ``[B, F, 3, H, W]`` in [0, 1]), ``np``, ``pil`` or ``latent``.

        Raises:
            ValueError: a size that the family cannot make, blocks wider than trained, or guidance other than 1.
        """
        if guidance_scale != 1:
            raise ValueError(
                f"guidance_scale is {guidance_scale}; allowed is 1, a student's guidance is in its weights"
            )
        if prompt is not None:
            prompts = [prompt] if isinstance(prompt, str) else prompt
            prompt_embeds, prompt_embeds_mask = self.backbone.encode_prompts(
                self, prompts, self.backbone.max_sequence_length
            ).values()
        given = {"height": height, "width": width, "num_frames": num_frames}
        size = {k: v or getattr(self.backbone.size, k) or self.backbone.default[k] for k, v in given.items()}
        shapes = MiniMaxH3(self.backbone.configs, Size(**size)).latent_shapes()
        start = {"latents": latents, "audio_latents": audio_latents}
        for name, (m, shape) in zip(start, shapes.items()):
            if start[name] is None:
                noise = randn_tensor((len(prompt_embeds), *shape), generator, self.device)
                start[name] = noise * float(self.student.grid.sigma[m][0])
        samples = []
        for i in range(len(prompt_embeds)):
            video, sound = start["latents"][i : i + 1], start["audio_latents"][i]
            if not self.finished:
                rows = self.backbone._text_rows(prompt_embeds_mask[i : i + 1])
                state = self.denoise(
                    prompt_embeds=prompt_embeds[i : i + 1, rows].to(self.device),
                    text_token_tags=torch.full((len(rows),), TEXT),  # on the CPU, where it is packed
                    latents=video,
                    audio_latents=sound,
                    num_inference_steps=num_inference_steps,
                    **size,
                )
                video, sound = state.get("latents"), state.get("audio_latents")
            if output_type == "latent":
                samples.append(Made(video, sound[None]))
                continue
            out = self.decode(latents=video, audio_latents=sound, output_type=output_type)
            samples.append(Made(out.get("videos"), out.get("audio")))
        frames, sounds = zip(*samples)
        whole = torch.cat(frames) if isinstance(frames[0], Tensor) else [video for part in frames for video in part]
        return Made(whole, torch.cat(sounds))
