"""A tiny random Qwen-Image 2.1 checkpoint, and its stock pipeline's own trajectory."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Qwen2Tokenizer

from pdd.backbones import Size

ABSENT = ["text_encoder"]
SIZE = Size(height=96, width=128)  # 6 x 8 latents


class Words(ProcessorMixin):
    """Stands in for Qwen3VLProcessor, which needs torchvision for its pictures; the pipeline gives it text alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def __call__(self, text, **options):
        return self.tokenizer(text, **options)

    def apply_chat_template(self, conversation, **options):
        texts = [f"<|im_start|>{turn['role']}\n{turn['content'][0]['text']}<|im_end|>\n" for turn in conversation]
        return self.tokenizer(["".join(texts)]).input_ids

    def save_pretrained(self, folder, **options):
        self.tokenizer.save_pretrained(folder)

    @classmethod
    def from_pretrained(cls, folder, **options):
        return cls(Qwen2Tokenizer.from_pretrained(folder))


def tokenizer() -> Qwen2Tokenizer:
    """A token a byte, and the markers of Qwen's templates."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}
    markers = [
        "<|im_start|>",
        "<|im_end|>",
        *(f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")),
    ]
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=markers)


def build(folder: Path, **changes) -> None:
    """Save the pipeline as Diffusers does; its text encoder is left out."""
    torch.manual_seed(0)
    transformer = QwenImage21Transformer2DModel(**{
        "in_channels": 6, "out_channels": 6, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "context_in_dim": 12, "axes_dims_rope": (2, 2, 4), **changes,
    })  # fmt: skip
    vae = AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, z_dim=6, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.1] * 6,
        latents_std=[1.5] * 6,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    QwenImage21Pipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, processor=Words(tokenizer()), **dict.fromkeys(ABSENT)
    ).save_pretrained(folder)


def conditioning(batch: int, seed: int) -> dict[str, torch.Tensor]:
    """Random conditioning, every column ``[B, ...]``; texts of several lengths, padded with noise."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, 7, dtype=torch.int64)
    for i in range(batch):
        mask[i, 7 - (seed - 1 + i) % 5 :] = 0  # lengths 7 and 6 for seed 1, 4 for seed 9
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
    pipe = QwenImage21Pipeline.from_pretrained(folder, **dict.fromkeys(ABSENT))
    # the sigmas given are final: its scheduler would shift them once more
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    pipe.set_progress_bar_config(disable=True)
    # its own encoding pads to the longest text
    cond, uncond = (
        {n: v[:, : c["prompt_embeds_mask"].sum(1).max()] for n, v in c.items()} for c in (cond, uncond or cond)
    )
    negative = {f"negative_{name}": value for name, value in uncond.items()} if guidance != 1 else {}
    batch, channels, *sides = state["image"].shape
    height, width = (side * 16 for side in sides)
    tokens = pipe(
        **cond, **negative, latents=pipe._pack_latents(state["image"], batch, channels, *sides), sigmas=sigmas["image"],
        num_inference_steps=len(sigmas["image"]), true_cfg_scale=guidance, height=height, width=width,
        output_type="latent",
    ).images  # fmt: skip
    return {"image": pipe._unpack_latents(tokens, height, width, 16)[:, :, 0]}
