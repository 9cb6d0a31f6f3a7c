"""Faults of values: a NaN or a flipped bit in a tensor that this rank holds."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from paceline.run.numerics.precision import INTEGERS


@torch.no_grad()
def spoil(tensor: torch.Tensor, kind: str, bit: int, at: float, which: float) -> None:
    """Put a NaN (`nan`) into a tensor, or flip one bit of one element (`flip`), in place.

    `at` in [0, 1) draws the element, and `which` the bit where `bit` is -1.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    flat = local.view(-1) if local.is_contiguous() else local  # else its first element
    place = int(at * flat.numel()) if flat.dim() == 1 else (0,) * flat.dim()
    if kind == "nan":
        flat[place] = torch.nan
        return
    width = 8 * flat.element_size()
    chosen = int(which * width) if bit < 0 else min(bit, width - 1)
    one = flat[place].clone()
    pattern = 1 << chosen
    pattern = pattern - 2**width if width > 8 and chosen == width - 1 else pattern  # the sign bit
    flat[place] = (one.view(INTEGERS[one.element_size()]) ^ pattern).view(one.dtype)


def spoiled(tensor: torch.Tensor, kind: str, bit: int, at: float, which: float) -> torch.Tensor:
    """Return a copy of a tensor with a NaN or a flipped bit in it."""
    copy = tensor.clone()
    spoil(copy, kind, bit, at, which)
    return copy
