"""Frozen weights in four bits, spread over all ranks that read different samples.

Each rank rests with a part of a layer's values, and all gather the layer whenever it is unpacked, in the forward and
again in the backward pass. Its scales, a thirty-second of it, stay whole. (FSDP2 shards parameters; these are buffers.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.task.adapt.linear import VALUES, PackedLinear

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@torch.no_grad()
def spread_packed(model: nn.Module, axis: DeviceMesh) -> None:
    """Leave this rank its part of the four bits of every layer of a model, on the meta device or not."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module._buffers[VALUES] = _part(module.weight_nf4, axis)


def _part(whole: Tensor, axis: DeviceMesh) -> DTensor:
    """Return a vector that every rank holds as one of which each holds what torch.chunk cuts for it."""
    from torch.distributed.tensor import DTensor, Shard  # never on one device

    chunks = whole.chunk(axis.size())
    rank = axis.get_local_rank()
    local = chunks[rank].clone() if rank < len(chunks) else whole.new_empty(0)
    return DTensor.from_local(local, axis, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
