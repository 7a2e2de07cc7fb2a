"""Pictures of samples: grids, and labelled tables of grids."""

from __future__ import annotations

import torch
from einops import rearrange
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor


def to_uint8(images: Tensor) -> Tensor:
    """Pictures ``[B, C, H, W]`` in [-1, 1] as uint8 ``[B, H, W, 3]``; one channel becomes grey."""
    if images.shape[1] == 1:
        images = images.expand(-1, 3, -1, -1)
    return ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()


def grid(images: Tensor, columns: int, gap: int = 2) -> Image.Image:
    """Pictures ``[B, C, H, W]`` in [-1, 1], row by row, on grey ground; small ones are enlarged."""
    pixels = to_uint8(images)
    scale = max(1, 32 // pixels.shape[1])
    pixels = pixels.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    missing = -len(pixels) % columns
    ground = 128
    pixels = torch.cat([pixels, pixels.new_full((missing, *pixels.shape[1:]), ground)])
    pixels = torch.nn.functional.pad(pixels, (0, 0, 0, gap, 0, gap), value=ground)
    return Image.fromarray(rearrange(pixels, "(r c) h w d -> (r h) (c w) d", c=columns).numpy())


def table(cells: list[list[Image.Image]], rows: list[str], columns: list[str], title: str = "") -> Image.Image:
    """Pictures in labelled rows and columns."""
    font, small = ImageFont.load_default(15), ImageFont.load_default(13)
    gap, left = 14, 16 + max(int(font.getlength(label)) for label in rows)
    widths = [max(cell.width for cell in column) for column in zip(*cells)]
    heights = [max(cell.height for cell in row) for row in cells]
    lines = max(len(label.split("\n")) for label in columns)
    top = (30 if title else 8) + 18 * lines
    size = (left + sum(widths) + gap * len(widths), top + sum(heights) + gap * len(heights))
    canvas = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(canvas)
    if title:
        draw.text((10, 7), title, "black", font)
    x = left
    for width, label in zip(widths, columns):
        for i, line in enumerate(label.split("\n")):
            draw.text((x, top - 18 * (lines - i)), line, "black", font if i == 0 else small)
        x += width + gap
    y = top
    for row, height, label in zip(cells, heights, rows):
        draw.text((8, y + height // 2 - 8), label, "black", font)
        x = left
        for cell, width in zip(row, widths):
            canvas.paste(cell, (x, y))
            x += width + gap
        y += height + gap
    return canvas
