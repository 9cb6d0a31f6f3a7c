"""What a rank holds of a tensor that may be spread over ranks, and the whole of it; and what is put back in buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.task.models.spread import is_spread

Corner = tuple[int, ...]


def held_part(tensor: Tensor) -> tuple[Tensor, Corner, Corner]:
    """Return what this rank holds of a tensor, where in it that begins, and its shape."""
    if is_spread(tensor):
        (chunk,) = tensor.__create_chunk_list__()  # as for a checkpoint; offsets and sizes of this rank's shard
        return tensor.to_local(), tuple(chunk.offsets), tuple(chunk.sizes)
    return tensor, (0,) * tensor.dim(), tuple(tensor.shape)


def local_of(tensor: Tensor | None) -> Tensor:
    """Return the part of a tensor on this rank: all of a plain one. None is a mistake of the caller.

    Outside of `no_grad` taking the part is a step of the graph, and costs a node of it for each tensor.
    """
    assert tensor is not None
    return tensor.to_local() if is_spread(tensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank that holds a part of it. All of them call it, in the same order."""
    return tensor.full_tensor() if is_spread(tensor) else tensor


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put a model's buffers back at the end of the block, also where its passes have put others in their places.

    One that a pass has given another size, as observers of ranges do with their first rows, has its own again.
    """
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                held = buffer if buffer.shape == value.shape else buffer.resize_(value.shape)
                setattr(module, name, held.copy_(value))


@torch.no_grad()
def put_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    """Give a buffer a value, which may have another shape than the one there: a table of positions may have grown."""
    held = model.get_buffer(name)
    if held.shape == value.shape:
        held.copy_(value)
    else:
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, value.to(held.device, held.dtype, copy=True))
