"""Rows of all data ranks, with gradients, for losses in which the rows of a batch see each other (task/coupling.py)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.run.parallel.context.exchange import all_gather, reduce_scatter


@dataclass(frozen=True)
class GatheredRows:
    """Gathers the rows of the ranks of a group; ranks may have different numbers of them."""

    group: dist.ProcessGroup
    counts: bool = True  # whether this rank's rows are part of the batch

    def __call__(self, x: Tensor) -> tuple[Tensor, slice]:
        """Return `x` [rows, ...] of every rank in rank order, [all rows, ...], and which rows are this rank's.

        A rank whose rows do not count is shown some others in their place.
        """
        own = torch.full((1,), len(x) if self.counts else 0, dtype=torch.int64, device=x.device)
        sizes = own.new_empty(self.group.size())
        all_gather(sizes, own, group=self.group)
        rows: list[int] = sizes.tolist()
        first = sum(rows[: self.group.rank()]) if self.counts else 0
        return _GatherRows.apply(x, rows, self.group), slice(first, first + len(x))

    def without_own(self) -> GatheredRows:
        """Return what gathers rows on a rank whose own rows only stand in for missing ones, and are shown to nobody."""
        return dataclasses.replace(self, counts=False)


class _GatherRows(torch.autograd.Function):
    """All-gather of rows; the gradient of each row is summed over the ranks that saw it, in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group, ctx.given = rows, group, len(x)
        parts = x.new_empty(group.size(), max(rows), *x.shape[1:])
        own = x.new_zeros(parts.shape[1:])
        own[: rows[group.rank()]] = x[: rows[group.rank()]]
        all_gather(parts.view(-1), own.view(-1), group=group)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SumRows.apply(grad, ctx.rows, ctx.given, ctx.group), None, None


class _SumRows(torch.autograd.Function):
    """The way back of _GatherRows, whose own way back that is: a gradient may be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, rows: list[int], given: int, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        wide = torch.promote_types(grad.dtype, torch.float32)
        parts = grad.new_zeros(group.size(), max(rows), *grad.shape[1:], dtype=wide)
        for part, own in zip(parts, grad.split(rows), strict=True):
            part[: len(own)] = own
        total = torch.empty_like(parts[0])
        reduce_scatter(total.view(-1), parts.view(-1), group=group)
        by_x, count = grad.new_zeros(given, *grad.shape[1:]), rows[group.rank()]
        by_x[:count] = total[:count]
        return by_x

    @staticmethod
    def backward(ctx: Any, by_x: Tensor) -> tuple[Tensor, None, None, None]:
        return _GatherRows.apply(by_x, ctx.rows, ctx.group), None, None, None
