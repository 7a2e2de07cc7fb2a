"""Pictures, videos and sounds, from files and to files."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

Source = str | BytesIO  # a file's path, or what is in it


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


def read_picture(source: Source) -> Image.Image:
    """A picture file, upright."""
    with Image.open(source) as picture:
        return ImageOps.exif_transpose(picture)


def read_frames(source: Source, fps: float) -> Iterator[Image.Image]:
    """What a video shows at 0, 1 / fps, 2 / fps ... seconds, upright; it lasts until the last frame's own end.

    Raises:
        ValueError: there is no video in it.
    """
    with av.open(source) as container:
        if not container.streams.video:
            raise ValueError("there is no video in it")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        own = 1 / float(stream.average_rate or stream.guessed_rate)
        start, shown, number = None, None, 0
        for frame in container.decode(stream):
            start = frame.time if start is None else start
            # a thousandth of a frame: times are rounded to the file's time base
            while shown is not None and number < (frame.time - start) * fps - 1e-3:
                yield _upright(shown)
                number += 1
            shown, end = frame, frame.time - start + own
        while shown is not None and number < end * fps - 1e-3:
            yield _upright(shown)
            number += 1


def _upright(frame: av.VideoFrame) -> Image.Image:
    picture = frame.to_image()
    return picture.rotate(frame.rotation, expand=True) if frame.rotation else picture


def read_sound(source: Source, rate: int, seconds: float) -> Tensor:
    """The first so many seconds of a file's sound, of a video too, in stereo: ``[2, S]`` in [-1, 1].

    Raises:
        ValueError: there is no sound in it.
    """
    parts, wanted = [], round(seconds * rate)
    with av.open(source) as container:
        if not container.streams.audio:
            raise ValueError("there is no sound in it")
        # one channel would be made two of half the power each: it is repeated as it is
        layout = "mono" if container.streams.audio[0].channels == 1 else "stereo"
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
        for frame in container.decode(audio=0):
            parts += [part.to_ndarray() for part in resampler.resample(frame)]
            if sum(part.shape[1] for part in parts) >= wanted:
                break
        else:
            parts += [part.to_ndarray() for part in resampler.resample(None)]
    return torch.from_numpy(np.concatenate(parts, 1)[:, :wanted]).clamp(-1, 1).expand(2, -1)


def pixels(picture: Image.Image, height: int, width: int, mode: str = "RGB") -> Tensor:
    """A picture resized and cut at its sides to that size, keeping its middle and its proportions: ``[C, H, W]`` in [-1, 1]."""
    fitted = ImageOps.fit(picture.convert(mode), (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1) / 127.5 - 1
