"""Collectives that autograd knows: each moves an activation over the ranks that share a layer's matrices.

Activations are plain tensors [..., seq, width]. A tensor is *whole* (every rank holds it), *split* (every rank holds
its part along the sequence) or *partial* (the ranks' tensors add up to it). Going forward from one kind to another, the
gradient comes back the other way (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2, whose f, g and their
conjugates these are):

| function | forward          | communicates   | gradient          | communicates   |
|----------|------------------|----------------|-------------------|----------------|
| share    | whole -> whole   | nothing        | partial -> whole  | all-reduce     |
| add      | partial -> whole | all-reduce     | whole -> whole    | nothing        |
| gather   | split -> whole   | all-gather     | partial -> split  | reduce-scatter |
| scatter  | partial -> split | reduce-scatter | split -> whole    | all-gather     |
| join     | split -> whole   | all-gather     | whole -> split    | nothing        |
| part     | whole -> split   | nothing        | split -> whole    | all-gather     |
| once     | whole -> whole   | nothing        | whole -> partial  | nothing        |

`gather` belongs before ranks that compute different things with the whole, `join` before ranks that compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ConfigError

SEQUENCE = -2  # the dimension that is split

# torch 2.13 gave both a new name and warns of the old one.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def share(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a whole `x` for ranks that go on with different parts of a layer; its gradient is summed over them."""
    return _Move.apply(x, _same, _sum, group)


def add(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' partial `x`, on every rank."""
    return _Move.apply(x, _sum, _same, group)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the whole of a split `x`, for ranks that go on with different parts of a layer."""
    return _Move.apply(x, _gathered, _scattered, group)


def scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along the sequence of the sum of the ranks' partial `x`."""
    return _Move.apply(x, _scattered, _gathered, group)


def join(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the whole of a split `x`, for ranks that all compute the same with it."""
    return _Move.apply(x, _gathered, _own, group)


def part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along the sequence of a whole `x`."""
    return _Move.apply(x, _own, _gathered, group)


def once(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a whole `x` that all ranks computed alike from shared tensors; the gradient goes back on the first rank.

    Other ranks send zeros back: with the same graph everywhere, collectives come in the same order, in recompute too.
    """
    return _Move.apply(x, _same, _of_the_first, group)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], group: Any) -> Tensor:
        ctx.there, ctx.back, ctx.group = there, back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():  # with create_graph: the way back has a gradient too, which goes there again
            return _Move.apply(grad, ctx.back, ctx.there, ctx.group), None, None, None
        return ctx.back(grad, ctx.group), None, None, None


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.detach()  # the same numbers; a view would hold its base, which may hold it in turn


def _of_the_first(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x if group.rank() == 0 else torch.zeros_like(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # others may still read x
    dist.all_reduce(total, group=group)
    return total.detach()  # of a result changed in place torch 2.11's compiler takes another backward pass


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [..., ranks * seq, width] from every rank's [..., seq, width]."""
    parts = x.new_empty((group.size(), *x.shape))
    _all_gather(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts.movedim(0, SEQUENCE - 1).flatten(SEQUENCE - 1, SEQUENCE)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's [..., seq / ranks, width] of the sum over ranks of [..., seq, width]."""
    parts = x.unflatten(SEQUENCE, (group.size(), _part_length(x, group))).movedim(SEQUENCE - 1, 0).contiguous()
    total = parts.new_empty(parts.shape[1:])
    _reduce_scatter(total.view(-1), parts.view(-1), group=group)
    return total


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    length = _part_length(x, group)
    return x.narrow(SEQUENCE, group.rank() * length, length).contiguous()


def _part_length(x: Tensor, group: dist.ProcessGroup) -> int:
    seq, ranks = x.shape[SEQUENCE], group.size()
    if seq % ranks:
        raise ConfigError(
            f"a sequence of {seq} positions over tp = {ranks}",
            "sequence parallel gives every rank an equal part of it",
            f"sequences of {seq - seq % ranks or ranks} positions, or rules without the style 'sequence'",
        )
    return seq // ranks
