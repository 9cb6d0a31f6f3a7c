"""Statistics over the rows of all data ranks, for `nn.SyncBatchNorm` (task/models/layers/batch_norm.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.run.process.groups import Mesh
from paceline.spec.plan import Plan
from paceline.task.models.layers.batch_norm import whole_batch_norms


@dataclass
class RankSums:
    """Adds up tensors over the ranks of a group, but for those of a rank whose rows only stand in for missing ones."""

    group: dist.ProcessGroup
    counts: bool = True  # whether this rank's rows are part of the batch; set before each forward pass

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks; its gradient is that of all ranks' losses."""
        return _Sum.apply(x if self.counts else x * 0.0, self.group)


class _Sum(torch.autograd.Function):
    """An all-reduce whose gradient is one too: the loss of every rank depends on the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None


def share_statistics(model: nn.Module, mesh: Mesh | None, plan: Plan) -> RankSums | None:
    """Have every such normalisation of the model see the rows of all data ranks.

    Return what tells whether a rank's rows count; None without such a module or other ranks with rows.
    """
    norms: list[Any] = list(whole_batch_norms(model))
    if mesh is None or plan.layout.data_degree == 1 or not norms:
        return None
    sums = RankSums(mesh.data)
    for norm in norms:
        norm.add_up = sums
        if plan.compile:
            norm.forward = torch.compiler.disable(norm.forward)  # sums over ranks are none of the compiler's
    return sums
