"""What a rank holds of a tensor that may be spread over ranks."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

Corner = tuple[int, ...]


def held_part(tensor: Tensor) -> tuple[Tensor, Corner, Corner]:
    """Return what this rank holds of a tensor, where in it that begins, and its shape."""
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()  # as for a checkpoint; offsets and sizes of this rank's shard
        return tensor.to_local(), tuple(chunk.offsets), tuple(chunk.sizes)
    return tensor, (0,) * tensor.dim(), tuple(tensor.shape)


def gathered(tensor: Tensor) -> Tensor:
    """Return all of a tensor; every rank that holds a part of it calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
