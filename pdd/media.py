"""Videos with sound, and sounds, as files."""

from __future__ import annotations

import wave
from fractions import Fraction
from pathlib import Path

import av
import torch
from torch import Tensor


def write_video(path: Path, frames: Tensor, fps: float, sound: Tensor | None = None, rate: int = 0) -> None:
    """An H.264 MP4, with AAC sound if there is any.

    Args:
        frames: ``[F, 3, H, W]`` in [0, 1]; sides must be even, as H.264 halves them for colour.
        fps: frames per second.
        sound: ``[channels, S]`` in [-1, 1], one channel or two.
        rate: samples per second.
    """
    pixels = (frames.float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    with av.open(str(path), mode="w") as container:
        video = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        video.height, video.width = pixels.shape[1:3]
        video.pix_fmt, video.options = "yuv420p", {"crf": "12"}
        audio = None
        if sound is not None:
            audio = container.add_stream("aac", rate=rate, layout="stereo" if len(sound) == 2 else "mono")
        for pixel in pixels:
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixel, format="rgb24")))
        container.mux(video.encode())
        if audio is not None:
            samples = sound.float().clamp(-1, 1).cpu().contiguous().numpy()
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=audio.layout.name)
            frame.sample_rate = rate
            container.mux(audio.encode(frame))
            container.mux(audio.encode())


def write_sound(path: Path, sound: Tensor, rate: int) -> None:
    """A 16-bit WAV of ``[channels, S]`` in [-1, 1]."""
    samples = (sound.float().clamp(-1, 1) * 32767).round().to(torch.int16).T.cpu().contiguous()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(sound))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.numpy().tobytes())
