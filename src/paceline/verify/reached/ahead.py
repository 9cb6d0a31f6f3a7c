"""Weights as a few steps of training make them: of what stands behind weights of zero, the first ones say nothing.

A block behind a gate of zeros and a head of zeros (adaLN-zero, zero convolutions), or a policy that begins as its own
reference, gives at first what it would give without its rows: whether it is a sum over rows does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

STEPS = 4  # the first moves a head of zeros, the second the gates before it, the third what stands behind these
SIZE = 0.1  # of a step, over the root mean square of a weight
SMALLEST = 0.1  # that of weights which are zero, or nearly so, is taken for this

FAR_STEPS = 32  # after so many, losses of a few rows are near zero
# Up the gradient any step leads to larger losses, and fewer are as far: 1.25 to the 14th is 23, 1.1 to the 32nd 21.
UP_STEPS, UP_SIZE = 14, 0.25


@dataclass(frozen=True)
class Walk:
    """How far weights are moved, and which way: down the gradient, or up it."""

    steps: int = STEPS
    is_up: bool = False
    size: float = SIZE

    def __str__(self) -> str:
        return f"{self.steps} steps {'up' if self.is_up else 'down'} the gradient"


FAR_WALKS = (Walk(FAR_STEPS), Walk(UP_STEPS, is_up=True, size=UP_SIZE))

ByName = Mapping[str, Tensor]


def walk(model: nn.Module, gradients: Callable[[], ByName], way: Walk) -> None:
    """Move a model's weights as some steps of gradient descent would, each weight by a like part of its own size."""
    for _ in range(way.steps):
        _step(model, gradients(), -way.size if way.is_up else way.size)


def sleeps(gradients: ByName) -> bool:
    """Return whether some weight has a gradient of zeros: what its part of the model computes shows nowhere."""
    return any(gradient.numel() > 0 and not bool(gradient.any()) for gradient in gradients.values())


@torch.no_grad()
def _step(model: nn.Module, gradients: ByName, part: float) -> None:
    for name, weight in model.named_parameters():
        gradient = gradients.get(name)
        if gradient is not None and (size := _size(gradient)) > 0:
            weight.sub_(gradient * (part * max(_size(weight), SMALLEST) / size))


def _size(tensor: Tensor) -> float:
    """Return the root mean square of a tensor's elements, 0 of none."""
    return float(tensor.abs().square().mean().sqrt()) if tensor.numel() else 0.0
