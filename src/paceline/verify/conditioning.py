"""Conditioning: how far a unit in the last place of the weights moves what is computed from them.

No program can be nearer to another than that, since weights themselves are known to one unit in the last place.
"""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def moved_by_one_ulp(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Move every weight of a model by up to one unit in the last place of `dtype`, at random, in place."""
    generator = torch.Generator().manual_seed(seed)
    eps = torch.finfo(dtype).eps
    for parameter in model.parameters():
        if parameter.is_floating_point():
            signs = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.add_(parameter * (signs * eps).to(parameter.dtype))
