"""The all-to-all that brings rows to the ranks of their experts and their results back, exactly.

The host waits for the device once in a layer: it is told how many rows go where, and says so to the all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class AllToAll:
    """Exchanges rows over the ranks of `group`, of which each holds the same number of neighbouring experts."""

    group: dist.ProcessGroup

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, object]:
        """Return (rows for this rank's experts sorted by expert, counts of them, what `combine` needs).

        `rows` [tokens, hidden] are sorted by expert, `counts` [experts] int64 says how many each expert gets.
        """
        sent = counts.view(self.group.size(), -1)  # [ranks, experts of each]
        arriving = torch.empty_like(sent)  # [ranks that send, experts of this rank]
        dist.all_to_all_single(arriving, sent.contiguous(), group=self.group)
        # The one wait for the device in a layer: an all-to-all is told on the host how many rows go where.
        out_sizes, in_sizes = torch.stack([arriving.sum(dim=1), sent.sum(dim=1)]).tolist()
        received = exchange_rows(rows, out_sizes, in_sizes, self.group)
        # They come sorted by sender first; products need them sorted by expert first.
        expert = torch.arange(arriving.shape[1], device=rows.device).repeat(arriving.shape[0])
        order = expert.repeat_interleave(arriving.flatten(), output_size=len(received)).argsort(stable=True)
        return received[order], arriving.sum(dim=0), (order.argsort(), in_sizes, out_sizes)

    def combine(self, results: Tensor, ticket: Any) -> Tensor:
        """Return the results of the rows that this rank sent, in the order in which it sent them."""
        order, out_sizes, in_sizes = ticket
        return exchange_rows(results[order], out_sizes, in_sizes, self.group)


def exchange_rows(rows: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return what the ranks of `group` send to this one, [sum(out_sizes), hidden], in rank order.

    `in_sizes` says how many of `rows` go to each rank, `out_sizes` how many come from each. Gradients go back.
    """
    return _ExchangeRows.apply(rows, out_sizes, in_sizes, group)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (out_sizes, in_sizes), group
        return _all_to_all(rows, out_sizes, in_sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out_sizes, in_sizes = ctx.sizes
        return exchange_rows(grad, in_sizes, out_sizes, ctx.group), None, None, None


def _all_to_all(rows: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(out_sizes), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), out_sizes, in_sizes, group=group)
    return received
