"""What a rank holds of a tensor that may be spread over ranks, and the whole of it."""

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


def local_of(tensor: Tensor | None) -> Tensor:
    """Return the part of a tensor on this rank: all of a plain one. None is a mistake of the caller.

    Outside of `no_grad` taking the part is a step of the graph, and costs a node of it for each tensor.
    """
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank that holds a part of it. All of them call it, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
