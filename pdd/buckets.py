"""Media of all sizes as latents of a few shapes: the nearest of several aspect ratios of about the same area."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pdd.backbones import Backbone, Size, State
from pdd.media import Source, pixels, read_frames, read_picture, read_sound

WIDEST = 2.0  # the longest side by the shortest


class Dropped(Exception):
    """A row whose media are not encoded: ``unreadable``, ``too short`` or ``too small``, and in what way."""


def name_of(size: Size) -> str:
    """A bucket as the dataset names it: height x width, and x frames of a video."""
    return "x".join(str(value) for value in vars(size).values() if value is not None)


def size_of(name: str) -> Size:
    return Size(*map(int, name.split("x")))


def fits(backbone: Backbone, size: Size) -> bool:
    try:
        backbone.at(size).latent_shapes()
    except ValueError:
        return False
    return True


def aspect_buckets(backbone: Backbone, size: Size, number: int) -> list[Size]:
    """``size``, and ``number`` aspect ratios from 1 : 2 to 2 : 1 of its area, as near as the family can make them.

    Raises:
        ValueError: the family cannot make ``size`` itself.
    """
    backbone.at(size).latent_shapes()
    found, area = [size], size.height * size.width
    for i in range(number):
        ratio = WIDEST ** (2 * i / (number - 1) - 1) if number > 1 else 1.0  # width by height
        bucket = size
        for side, wanted in (("height", math.sqrt(area / ratio)), ("width", math.sqrt(area * ratio))):
            near = sorted(range(1, 2 * round(wanted)), key=lambda pixels: abs(pixels - wanted))
            possible = (dataclasses.replace(bucket, **{side: pixels}) for pixels in near)
            bucket = next(candidate for candidate in possible if fits(backbone, candidate))
        found.append(bucket)
    return list(dict.fromkeys(found))


class MediaEncoder:
    """Media of one row -> its bucket and its latents there.

    Args:
        backbone: the family.
        buckets: their sizes; of the same number of frames.
        min_frames: a video is cut to the longest length that the family can make, up to the buckets' and from here on.
        max_enlarge: media that would have to be enlarged by more are too small.
        vaes: component -> autoencoder.
    """

    def __init__(
        self, backbone: Backbone, buckets: list[Size], min_frames: int, max_enlarge: float, vaes: Mapping[str, Any]
    ):
        self.backbone, self.buckets, self.max_enlarge, self.vaes = backbone, buckets, max_enlarge, vaes
        frames = range(min_frames, (buckets[0].num_frames or 0) + 1)
        self.lengths = [n for n in frames if fits(backbone, dataclasses.replace(buckets[0], num_frames=n))]

    def __call__(self, files: Mapping[str, Source]) -> tuple[str, State]:
        """The bucket's name, and modality -> latents ``[...]``.

        Args:
            files: ``image``, or ``video`` and perhaps ``audio``; without that a video's own sound is meant.

        Raises:
            Dropped: see there.
        """
        size, media = self._image(files["image"]) if "image" in files else self._video(files)
        with torch.no_grad():
            latents = self.backbone.at(size).encode_media(self.vaes, {m: x[None] for m, x in media.items()})
        return name_of(size), {m: x[0].cpu() for m, x in latents.items()}

    def _image(self, source: Source) -> tuple[Size, dict[str, Tensor]]:
        picture = _read(lambda: read_picture(source))
        size = self._bucket(*picture.size)
        return size, {"image": pixels(picture, size.height, size.width, self.backbone.picture_mode)}

    def _video(self, files: Mapping[str, Source]) -> tuple[Size, dict[str, Tensor]]:
        rate, frames, size = self.backbone.frame_rate, [], None

        def read() -> None:
            nonlocal size
            for frame in read_frames(files["video"], rate):
                size = size or self._bucket(*frame.size)
                frames.append(pixels(frame, size.height, size.width, self.backbone.picture_mode))
                if len(frames) == self.lengths[-1]:
                    return

        _read(read)
        length = max((n for n in self.lengths if n <= len(frames)), default=None)
        if length is None:
            raise Dropped(f"too short: {len(frames)} frames at {rate:g} a second, {self.lengths[0]} are needed")
        media = {"video": torch.stack(frames[:length], 1)}
        if "audio" in self.backbone.modalities:
            source = files.get("audio") or files["video"]
            if hasattr(source, "seek"):
                source.seek(0)
            media["audio"] = _read(lambda: read_sound(source, self.backbone.media_sound_rate(self.vaes), length / rate))
        return dataclasses.replace(size, num_frames=length), media

    def _bucket(self, width: int, height: int) -> Size:
        size = min(self.buckets, key=lambda b: abs(math.log(width / height * b.height / b.width)))
        enlarge = max(size.height / height, size.width / width)
        if enlarge > self.max_enlarge:
            raise Dropped(f"too small: {height} x {width} pixels, for {name_of(size)}")
        return size


def _read(read: Any) -> Any:
    try:
        return read()
    except Dropped:
        raise
    except Exception as error:  # damaged files raise whatever their decoder does
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Dropped(f"unreadable: {reason}") from None
