"""Parts of sharded tensors: a part as a tensor in shards, and parts cut out of a whole one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.task.models.held import local_of, whole_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def wrapped(local: Tensor, like: DTensor) -> DTensor:
    """Return this rank's part as a tensor with the placements of another. Both share the part's memory."""
    from torch.distributed.tensor import DTensor  # never without a tensor in shards

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class Cutter:
    """Cuts this rank's part out of whole tensors of one shape."""

    def __init__(self, like: DTensor) -> None:
        """Learn the cut from a sharded tensor. All ranks that hold a part of it call it."""
        from torch.distributed.tensor import Replicate, Shard

        self._like = like
        self._flat_indices: Tensor | None = None
        if any(type(place) not in (Shard, Replicate) for place in like.placements):
            # torch cuts a dimension twice with strides, and cannot cut a whole tensor so: ask where each element went.
            part = local_of(like)
            mine = torch.arange(part.numel(), device=part.device).view(part.shape)
            rank = like.device_mesh.get_rank()
            ids = whole_of(wrapped(mine + rank * like.numel(), like)).flatten()
            found = (ids // max(1, like.numel()) == rank).nonzero().flatten()
            self._flat_indices = found[ids[found].argsort()]

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, in memory of its own."""
        if self._flat_indices is not None:
            return whole.flatten()[self._flat_indices].view(local_of(self._like).shape)
        from torch.distributed.tensor import DTensor, Replicate

        mesh = self._like.device_mesh
        spread = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return local_of(spread.redistribute(placements=self._like.placements)).clone()
