"""What a rank holds of a tensor that may be spread over ranks, and the whole of it; and what is put back in buffers.

Whether a tensor or a module is spread is told without torch's library for that: importing `torch.distributed.tensor`
and `torch.distributed.fsdp` brings sympy and the compiler's symbols with it. Who has such a tensor has imported them; a
run on one device, or of plain copies, needs neither.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

Corner = tuple[int, ...]


def is_spread(tensor: object) -> TypeIs[DTensor]:
    """Return whether a tensor is one of torch's that lie on several ranks (DTensor)."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_sharded_unit(module: object) -> TypeIs[FSDPModule]:
    """Return whether a module is one whose weights FSDP2 gathers for its passes (FSDPModule)."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


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
