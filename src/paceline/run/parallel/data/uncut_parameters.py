"""Parameters that cannot be cut into shards: every rank holds them whole, and their gradients are summed here.

FSDP2 takes floating-point parameters with at least one dimension and one element. A temperature without dimensions, an
empty weight, a complex one or one of integers stays whole on all ranks, whatever the ZeRO class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.run.parallel.gradients import Gradients


def stays_whole(parameter: Tensor) -> bool:
    """Return whether a parameter cannot be cut into shards."""
    return parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_floating_point()


@dataclass
class WholeGradients:
    """Gradients that come together as `inner` says, and those of `parameters` as sums over `groups`, one by one.

    They are summed when all passes are over: ranks may reach other parameters, and would call collectives in another
    order. One that no rank reached has no gradient, as on one device; which those are the host asks the device in
    steps alone in which a rank has missed one, and until then such a gradient is zero.
    """

    inner: Gradients
    parameters: tuple[nn.Parameter, ...]
    groups: tuple[dist.ProcessGroup, ...]
    _missed: int = field(default=0, init=False)  # of `parameters`, by this rank
    _ranks: list[tuple[list[nn.Parameter], Tensor]] = field(default_factory=list, init=False)  # that reached each

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
        self._missed = sum(parameter.grad is None for parameter in self.parameters)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._ranks = [(alike, _sum_whole(alike, self.groups)) for alike in by_dtype.values()]

    def unreached(self) -> int:
        """Return how many parameters this rank's backward passes did not reach, of those that `settle` looks at."""
        return self.inner.unreached() + self._missed

    def settle(self) -> None:
        """Take the gradients from parameters that no rank reached."""
        self.inner.settle()
        for parameters, ranks in self._ranks:
            for parameter, count in zip(parameters, ranks.tolist(), strict=True):
                if not count:
                    parameter.grad = None


@torch.no_grad()
def _sum_whole(parameters: list[nn.Parameter], groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """Sum the gradients of parameters of one dtype, and return how many ranks reached each, on their device."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    # Filled on the device: numbers of the host would be copied there, and the host would wait for it.
    reached = [p.new_full((1,), float(p.grad is not None)) for p in parameters]
    flat = torch.cat([*(grad.reshape(-1) for grad in grads), *reached])
    for group in groups:
        dist.all_reduce(flat, group=group)
    *sums, ranks = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, grad, total in zip(parameters, grads, sums, strict=True):
        parameter.grad = grad.copy_(total.view(grad.shape))
    return ranks
