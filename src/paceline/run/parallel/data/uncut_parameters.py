"""Parameters that cannot be cut into shards: every rank holds them whole, and their gradients are summed here.

FSDP2 takes floating-point parameters with at least one dimension and one element. A temperature without dimensions, an
empty weight, a complex one or one of integers stays whole on all ranks, whatever the ZeRO class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def stays_whole(parameter: Tensor) -> bool:
    """Return whether a parameter cannot be cut into shards."""
    return parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_floating_point()


@dataclass(frozen=True)
class WholeGradients:
    """Gradients that come together as `inner` says, and those of `parameters` as sums over `groups`, one by one.

    They are summed when all passes are over: ranks may reach other parameters, and would call collectives in another
    order. One that no rank reached has no gradient, as on one device.
    """

    inner: Any  # Gradients
    parameters: tuple[nn.Parameter, ...]
    groups: tuple[dist.ProcessGroup, ...]

    def zero(self) -> None:
        """Forget the last step's gradients."""
        self.inner.zero()
        for parameter in self.parameters:
            parameter.grad = None

    def before_micro_batch(self, last: bool) -> None:
        """Prepare the coming backward pass."""
        self.inner.before_micro_batch(last)

    def finish(self) -> None:
        """Return once the sums are complete."""
        self.inner.finish()
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            _sum_whole(parameters, self.groups)

    def unreached(self) -> int:
        """Return how many parameters this rank's backward passes did not reach, of those that `settle` looks at."""
        return int(self.inner.unreached())

    def settle(self) -> None:
        """Take the gradients from parameters that no rank reached."""
        self.inner.settle()


@torch.no_grad()
def _sum_whole(parameters: list[nn.Parameter], groups: Iterable[dist.ProcessGroup]) -> None:
    """Sum the gradients of parameters of one dtype; each carries how many ranks reached it."""
    first = parameters[0]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    reached = torch.tensor([float(p.grad is not None) for p in parameters], dtype=first.dtype, device=first.device)
    flat = torch.cat([*(grad.reshape(-1) for grad in grads), reached])
    for group in groups:
        dist.all_reduce(flat, group=group)
    *sums, ranks = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, grad, total, count in zip(parameters, grads, sums, ranks.tolist(), strict=True):
        parameter.grad = grad.copy_(total.view(grad.shape)) if count else None
