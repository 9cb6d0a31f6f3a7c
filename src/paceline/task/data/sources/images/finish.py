"""From squares of pixels and what was drawn for them to a batch, wherever it is: the same bits on every device.

All is whole numbers: a crop is scaled by weights in 1/2,048, colours change by factors in 1/4,096, and the last step
looks each of the 256 values up in a table. No order of additions and no fused product can therefore change a bit, and a
row does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.task.data.sources.images.choices import FACTOR_BITS, PLACE_BITS
from paceline.task.data.sources.images.normals import NORMALS

ROWS_AT_ONCE = 64  # more take more memory on the way and are no faster
GRAY = (77, 150, 29)  # of 256: the luma of ITU-R BT.601, as Pillow rounds it to 8 bits


def table_of(normalise: str) -> Tensor:
    """Return what each of the 256 values becomes in each channel: float32 [3, 256]."""
    values = np.arange(256, dtype=np.float32) / np.float32(255)
    if normalise == "none":
        return torch.from_numpy(np.tile(values, (3, 1)))
    means, deviations = NORMALS[normalise]
    exact = [(np.arange(256) / 255 - mean) / deviation for mean, deviation in zip(means, deviations, strict=True)]
    return torch.from_numpy(np.stack(exact).astype(np.float32))


def finish_images(pixels: Tensor, choices: Tensor | None, table: Tensor, size: int) -> Tensor:
    """Return images as float32 [rows, 3, size, size], of uint8 pixels [rows, side, side, 3] on the table's device.

    `choices` are as `choices_of` draws them; None leaves the pixels, whose side is then `size`, as they are.
    """
    parts = [
        _finished(pixels[at : at + ROWS_AT_ONCE], None if choices is None else choices[at : at + ROWS_AT_ONCE], size)
        for at in range(0, len(pixels), ROWS_AT_ONCE)
    ]
    if not parts:
        return torch.empty((0, 3, size, size), device=pixels.device)
    values = torch.cat(parts).permute(0, 3, 1, 2)
    return torch.stack([table[channel][values[:, channel].long()] for channel in range(3)], dim=1)


def _finished(pixels: Tensor, choices: Tensor | None, size: int) -> Tensor:
    """Return the pixels after crop, flip and colours: [rows, size, size, 3], whole numbers in 0..255."""
    if choices is None:
        return pixels
    columns: list[Any] = list(choices.to(torch.int64).unbind(1))
    left, top, width, height, flip, brightness, contrast, saturation = columns
    side = pixels.shape[1]
    values = _scaled(pixels.to(torch.int32), *_between(top, height, side, size), 1)
    values = _scaled(values, *_between(left, width, side, size, flip), 2)
    rounded = (values + (1 << (2 * PLACE_BITS - 1))) >> (2 * PLACE_BITS)
    return _coloured(rounded, brightness, contrast, saturation)


def _between(start: Tensor, length: Tensor, side: int, size: int, flip: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return for each of `size` places of a row the pixel before it, and how far behind that it lies: [rows, size].

    The middle of place i lies at start + (i + 1/2) * length / size, as in Pillow and torch, where pixels' middles are
    half a pixel behind their edges.
    """
    places = torch.arange(size, device=start.device, dtype=torch.int64).expand(len(start), size)
    if flip is not None:
        places = torch.where(flip[:, None] > 0, size - 1 - places, places)
    at = start[:, None] + ((2 * places + 1) * length[:, None]) // (2 * size) - (1 << (PLACE_BITS - 1))
    at = at.clamp(0, (side - 1) << PLACE_BITS)
    return at >> PLACE_BITS, (at & ((1 << PLACE_BITS) - 1)).to(torch.int32)


def _scaled(values: Tensor, before: Tensor, behind: Tensor, dim: int) -> Tensor:
    """Return values between two pixels along a dimension, times 2,048: what lies at `before` and next to it."""
    shape = [len(values), 1, 1, 1]
    shape[dim] = before.shape[1]
    first, part = before.reshape(shape), behind.reshape(shape)
    second = (first + 1).clamp(max=values.shape[dim] - 1)
    one, two = torch.take_along_dim(values, first, dim), torch.take_along_dim(values, second, dim)
    return one * ((1 << PLACE_BITS) - part) + two * part


def _coloured(values: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Return values [rows, size, size, 3] with their colours changed, one after the other, each within 0..255."""
    zero = torch.zeros((), dtype=torch.int32, device=values.device)
    values = _away_from(zero, values, brightness)
    gray = _gray(values)
    mean = gray.sum((1, 2, 3), dtype=torch.int64) // (values.shape[1] * values.shape[2])
    values = _away_from(mean.to(torch.int32)[:, None, None, None], values, contrast)
    return _away_from(_gray(values), values, saturation)


def _away_from(centre: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """Return values whose distance from a centre is multiplied by each row's factor."""
    times = factor.to(torch.int32)[:, None, None, None]
    moved = centre + (((values - centre) * times + (1 << (FACTOR_BITS - 1))) >> FACTOR_BITS)
    return moved.clamp(0, 255)


def _gray(values: Tensor) -> Tensor:
    red, green, blue = values.split(1, dim=3)
    return (red * GRAY[0] + green * GRAY[1] + blue * GRAY[2]) >> 8
