"""Passes: how the forward and backward passes of a step's micro-batches are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from paceline.plan.plan import Plan
from paceline.run.loader import MicroBatch
from paceline.run.parallel.apply import Gradients
from paceline.run.precision import cast_floats
from paceline.run.rng import seed_at, seed_device
from paceline.task.coupling import without_own_rows

Objective = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]


class Passes(Protocol):
    """Runs micro-batches. What it returns adds up over all ranks to the global sums."""

    def accumulate(self, micro_batches: Sequence[MicroBatch], down: float) -> tuple[Any, Any]:
        """Run forward and backward on the loss times `down`; return this rank's share of (loss sum, weight)."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Run forward only; return this rank's share of (loss sum, weight)."""


@dataclass
class SequentialPasses:
    """One micro-batch after the other, each forward and then backward, on a model that is whole on every rank."""

    model: nn.Module
    objective: Objective
    gradients: Gradients
    plan: Plan
    device: torch.device
    seed: int
    # Takes this rank's part of a batch along the sequence, where ranks share sequences.
    take_part: Callable[[Any], Any] = lambda data: data
    part: int = 0  # which part that is: ranks that share a row draw random numbers of their own
    # Called after the forward pass of each micro-batch that counts: routers are watched here.
    after_forward: Callable[[nn.Module], None] | None = None

    def accumulate(self, micro_batches: Sequence[MicroBatch], down: float) -> tuple[Any, Any]:
        """Run forward and backward of all micro-batches; return this rank's share of the loss sum and the weight."""
        loss_total: Any = 0.0
        weight_total: Any = 0.0
        for index, micro in enumerate(micro_batches):
            self.gradients.before_micro_batch(last=index == len(micro_batches) - 1)
            seed_device(seed_at(self.seed, micro.position, self.part), self.device)
            loss_sum, weight = self._forward(micro)
            (loss_sum * (down if micro.counts else 0.0)).backward()
            if micro.counts:
                loss_total = loss_total + loss_sum.detach().double()
                weight_total = weight_total + weight
                if self.after_forward is not None:
                    self.after_forward(self.model)
        return self._share(loss_total), self._share(weight_total)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Run forward only; return this rank's share of the loss sum and the weight."""
        loss_total = weight_total = 0.0
        for micro in micro_batches:
            loss_sum, weight = self._forward(micro)
            if micro.counts:
                loss_total += float(loss_sum)
                weight_total += float(weight)
        return self._share(loss_total), self._share(weight_total)

    def _forward(self, micro: MicroBatch) -> tuple[torch.Tensor, Any]:
        objective = self.objective if micro.counts else without_own_rows(self.objective)
        return objective(self.model, self.take_part(in_model_precision(micro.data, self.plan)))

    def _share(self, value: Any) -> Any:
        """Return this rank's share of what all ranks of a tensor-parallel group hold alike."""
        return value / self.plan.layout.tp


def in_model_precision(data: Any, plan: Plan) -> Any:
    """Return a batch in the model's precision: data sets give fp32, and only fp64 weights cannot take it."""
    return cast_floats(data, torch.float64) if plan.precision == "fp64" else data
