"""Real media as latents: what the stock pipelines decode from them, aspect buckets, and training on them."""

import importlib
import json
import wave

import av
import numpy as np
import pytest
import torch
from datasets import load_from_disk
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image

from pdd.backbones import REGISTRY, Size, read_backbone
from pdd.buckets import aspect_buckets
from pdd.formats import load_autoencoders
from pdd.media import pixels, read_frames, read_picture, read_sound, write_sound, write_video

MODULES = sorted({target.split(":")[0] for target in REGISTRY.values()})


# ------------------------------------------------------------------------------------ against the stock pipelines


def decoded_by_stock(folder, module, backbone, latents):
    """Component -> what the stock pipeline's autoencoders decode when its transformer predicts no motion at all."""
    absent = [*module.ABSENT, *(["connectors"] if (folder / "connectors").exists() else [])]
    pipe = DiffusionPipeline.from_pretrained(folder, **dict.fromkeys(absent))
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()  # some of the families' own cannot make 2 steps
    forward = pipe.transformer.forward
    pipe.transformer.forward = lambda *a, **k: tuple(torch.zeros_like(v) for v in forward(*a, **k))
    decoded = {}
    for name in ("vae", "audio_vae"):
        if part := getattr(pipe, name, None):
            decode = part.decode
            part.decode = lambda z, *a, _d=decode, _n=name, **k: decoded.setdefault(_n, _d(z, *a, **k))
    backbone.fit_pipeline(pipe)
    cond = backbone.pipeline_condition(module.conditioning(1, 1))
    pipe(
        **cond,
        **backbone.to_pipeline(latents),
        **backbone.pipeline_arguments(),
        num_inference_steps=1,
        output_type="pt",
    )
    return {name: value[0] for name, value in decoded.items()}


@pytest.mark.parametrize("name", MODULES)
def test_the_stock_pipeline_decodes_what_was_encoded(name, tmp_path):
    """Scaled as the transformer sees them: the pipeline's own way back ends in ``decode(encode(x).mode())``."""
    module = importlib.import_module(f"family_{name}")
    module.build(tmp_path)
    size = getattr(module, "SIZE", Size(height=16, width=16))
    backbone = read_backbone(tmp_path, size)
    vaes = load_autoencoders(tmp_path, torch.float32, "cpu")
    g = torch.Generator().manual_seed(0)
    shape = (
        1,
        len(backbone.picture_mode),
        *([size.num_frames] if backbone.frame_rate else []),
        size.height,
        size.width,
    )
    media = {backbone.modalities[0]: torch.rand(shape, generator=g) * 2 - 1}
    if "audio" in backbone.modalities:
        media["audio"] = torch.rand(1, 2, 16000, generator=g) - 0.5
        for vae in vaes.values():  # as initialised the statistics are 0 and 1
            vae.latents_mean.uniform_(-1, 1, generator=g)
            vae.latents_std.uniform_(0.5, 2, generator=g)
            vae.save_pretrained(tmp_path / ("vae" if vae is vaes["vae"] else "audio_vae"))
    with torch.no_grad():
        latents = backbone.encode_media(vaes, media)
        assert {m: tuple(x.shape[1:]) for m, x in latents.items()} == backbone.latent_shapes()
        pictures = media[backbone.modalities[0]]
        pictures = pictures[:, :, None] if name.startswith("qwen") else pictures  # its autoencoder is a video's
        expected = {"vae": vaes["vae"].decode(vaes["vae"].encode(pictures).latent_dist.mode()).sample}
        if "audio" in media:
            from pdd.backbones.ltx2 import log_mel

            mel = log_mel(media["audio"], vaes["audio_vae"], backbone.latent_shapes()["audio"][1])
            expected["audio_vae"] = vaes["audio_vae"].decode(vaes["audio_vae"].encode(mel).latent_dist.mode()).sample
        decoded = decoded_by_stock(tmp_path, module, backbone, latents)
    assert decoded.keys() == expected.keys()
    for part in expected:
        torch.testing.assert_close(decoded[part], expected[part], rtol=1e-3, atol=1e-4)
        assert expected[part].std() > 1e-2
