"""The norm of gradients, as torch.nn.utils.get_total_norm has it, without what a step of small products pays for that.

torch copies the norm of each gradient to the first one's device by a call of its own, though all of them lie there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FOREACH = ("cpu", "cuda")  # devices on which get_total_norm takes the norms of plain tensors together


def norm_of(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, bit for bit that of get_total_norm; 0 of none."""
    if gradients and _are_alike(gradients):
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    return torch.nn.utils.get_total_norm(gradients, error_if_nonfinite=False)


def _are_alike(gradients: Sequence[Tensor]) -> bool:
    """Return whether they are plain tensors of one dtype on one device, of which torch makes one group."""
    dtype, device = gradients[0].dtype, gradients[0].device
    return device.type in FOREACH and all(
        type(each) is Tensor and each.dtype == dtype and each.device == device for each in gradients
    )
