"""Experts that a rank shares with nobody, left out of FSDP2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.run.parallel.gradients import Gradients
from paceline.spec.layout import Layout
from paceline.task.models.held import is_spread


class UnsharedExperts:
    """Experts that a rank shares with nobody: plain tensors compute with them and sum up their gradients.

    FSDP2 would copy them at every gather and reduction, in a group of one, and a DTensor's gradient goes through its
    dispatch in every micro-batch.
    """

    def __init__(self) -> None:
        self._leaves: dict[nn.Parameter, Tensor] = {}

    @staticmethod
    def of(layout: Layout, casts: bool) -> UnsharedExperts | None:
        """Return UnsharedExperts where each rank is alone with its experts and FSDP2 need not cast these; else None."""
        alone = layout.ep > 1 and layout.dp_shard * layout.cp == layout.ep and layout.dp_replicate == 1
        # A zero-bubble schedule computes gradients of weights apart, and finds them as a stage's parameters.
        return UnsharedExperts() if alone and layout.pp == 1 and not casts else None

    def leaf(self, weight: nn.Parameter) -> Tensor:
        """Return a plain tensor of the same storage, which gets the gradient in the weight's place."""
        assert is_spread(weight)
        with torch.no_grad():
            local = weight.to_local()
        leaf = self._leaves.get(weight)
        if leaf is None or leaf.data_ptr() != local.data_ptr():  # weights may get their storage later
            leaf = local.detach().requires_grad_(weight.requires_grad)
            self._leaves[weight] = leaf
        return leaf

    def hand_over(self) -> None:
        """Give every weight the gradient that its plain tensor got."""
        from torch.distributed.tensor import DTensor  # never without spread weights

        for weight, leaf in self._leaves.items():
            if leaf.grad is not None:
                assert is_spread(weight)
                grad = DTensor.from_local(
                    leaf.grad, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
                    stride=weight.stride(),
                )  # fmt: skip
                weight.grad = grad

    def forget(self) -> None:
        """Drop the gradients."""
        for leaf in self._leaves.values():
            leaf.grad = None


@dataclass(frozen=True)
class ExpertGradients:
    """Gradients that come together as `inner` says, but for those of experts that a rank has alone."""

    inner: Gradients
    alone: UnsharedExperts

    def zero(self) -> None:
        """Forget the last step's gradients."""
        self.inner.zero()
        self.alone.forget()

    def before_micro_batch(self, last: bool) -> None:
        """Prepare the coming backward pass."""
        self.inner.before_micro_batch(last)

    def finish(self) -> None:
        """Return once the sums are complete."""
        self.inner.finish()
        self.alone.hand_over()

    def unreached(self) -> int:
        """Return how many parameters this rank's backward passes did not reach."""
        return self.inner.unreached()

    def settle(self) -> None:
        """Take the gradients from parameters that no rank reached."""
        self.inner.settle()
