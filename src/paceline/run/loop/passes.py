"""Passes: how the forward and backward passes of a step's micro-batches are run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from paceline.run.loop.loader import MicroBatch
from paceline.run.numerics.precision import cast_floats
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import length_of
from paceline.run.parallel.data.statistics import RankSums
from paceline.run.parallel.entry import call
from paceline.run.parallel.gradients import Gradients
from paceline.spec.plan import Plan
from paceline.task.coupling import without_own_rows
from paceline.task.sums import as_sum, back_through

AnyObjective = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]


class Passes(Protocol):
    """Runs micro-batches. What it returns adds up over all ranks to the global sums."""

    def accumulate(self, micro_batches: Sequence[MicroBatch], down: float) -> tuple[object, object]:
        """Run forward and backward on the loss times `down`; return this rank's share of (loss sum, weight)."""

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], seen: Callable[[], None] | None = None
    ) -> tuple[float, float]:
        """Run forward only; return this rank's share of (loss sum, weight).

        `seen` is called after the objective of each micro-batch that counts, on ranks that know its loss.
        """

    def of_each(self, micro_batches: Sequence[MicroBatch], objective: AnyObjective) -> list[Any]:
        """Run another objective forward only; return what it returns for each micro-batch, of this rank's samples.

        It is None on ranks that are not told: those of a pipeline's stages before the last. Every rank calls it.
        """

    def wrap_objective(self, wrapper: Callable[[AnyObjective], AnyObjective]) -> None:
        """Call `wrapper(objective)` in the place of the objective from now on; a proof looks at losses there."""


class MicroBatchWatch(Protocol):
    """Looks at forward passes, and is told whether a micro-batch counts before each."""

    counts: bool


@dataclass
class SequentialPasses:
    """One micro-batch after the other, each forward and then backward, on a model that is whole on every rank."""

    model: nn.Module
    objective: AnyObjective
    gradients: Gradients
    plan: Plan
    randomness: SampleRandomness
    # Takes this rank's part of a batch along the sequence, where ranks share sequences.
    take_part: Callable[[Any], Any] = lambda data: data
    # Calls the objective on (model, data); a sharded model must be entered.
    call: Callable[[AnyObjective, nn.Module, Any], Any] = call
    # Within it a backward pass runs: errors that come of a sharded model are told as such.
    told: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    # Called after the forward pass of each micro-batch that counts: routers are watched here.
    after_forward: Callable[[nn.Module], None] | None = None
    # The number by which random numbers of a step are told apart: a step of several objectives has one for each.
    draws_as: Callable[[int], int] = lambda step: step
    statistics: RankSums | None = None  # of batch normalisation over all ranks
    watched_by: MicroBatchWatch | None = None  # who looks at what blocks give

    def accumulate(self, micro_batches: Sequence[MicroBatch], down: float) -> tuple[object, object]:
        """Run forward and backward of all micro-batches; return this rank's share of the loss sum and the weight."""
        loss_total: Any = 0.0
        weight_total: Any = 0.0
        for index, micro in enumerate(micro_batches):
            self.gradients.before_micro_batch(last=index == len(micro_batches) - 1)
            with self.randomness.during(sample_rows(micro, self.draws_as)):
                loss_sum, weight = as_sum(self._forward(micro), self.objective)
            with self.told():
                back_through(loss_sum * (down if micro.counts else 0.0), self.objective)
            if micro.counts:
                loss_total = loss_total + loss_sum.detach().double()
                weight_total = weight_total + weight
                if self.after_forward is not None:
                    self.after_forward(self.model)
        self.randomness.rest()
        return self._share(loss_total), self._share(weight_total)

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], seen: Callable[[], None] | None = None
    ) -> tuple[float, float]:
        """Run forward only; return this rank's share of the loss sum and the weight."""
        loss_total: Any = 0.0
        weight_total: Any = 0.0
        for micro in micro_batches:
            with self.randomness.during(sample_rows(micro)):
                loss_sum, weight = as_sum(self._forward(micro), self.objective)
            if micro.counts:
                loss_total = loss_total + in_double(loss_sum)
                weight_total = weight_total + in_double(weight)
                if seen is not None:
                    seen()
        self.randomness.rest()
        return self._share(float(loss_total)), self._share(float(weight_total))

    def of_each(self, micro_batches: Sequence[MicroBatch], objective: AnyObjective) -> list[Any]:
        """Run another objective forward only; return what it returns for each micro-batch, of this rank's samples."""
        found = []
        for micro in micro_batches:
            with self.randomness.during(sample_rows(micro)):
                found.append(self._forward(dataclasses.replace(micro, objective=objective)))
        self.randomness.rest()
        return found

    def wrap_objective(self, wrapper: Callable[[AnyObjective], AnyObjective]) -> None:
        """Call `wrapper(objective)` in the place of the objective from now on."""
        self.objective = wrapper(self.objective)

    def _forward(self, micro: MicroBatch) -> tuple[torch.Tensor, object]:
        objective = self.objective if micro.objective is None else micro.objective
        objective = objective if micro.counts else without_own_rows(objective)
        if self.statistics is not None:
            self.statistics.counts = micro.counts
        if self.watched_by is not None:
            self.watched_by.counts = micro.counts
        data = self.take_part(in_model_precision(micro.data, self.plan))
        return self.call(objective, self.model, data)

    def _share(self, value: Any) -> Any:
        """Return this rank's share of what all ranks of a tensor-parallel group hold alike."""
        return value / self.plan.layout.tp


def sample_rows(micro: MicroBatch, draws_as: Callable[[int], int] | None = None) -> SampleRows:
    """Return the samples of a micro-batch of a step, or of an evaluation, which draws the same every time.

    `draws_as(step)` tells steps apart; without it none is told from another, nor from an evaluation.
    """
    positions = micro.places
    if positions is None:
        positions = micro.position + np.arange(max(1, len(micro.ids)), dtype=np.int64)
    step = draws_as(micro.step) if draws_as else 0
    return SampleRows(positions, step, length_of(micro.data))


def in_double(number: Any) -> Any:
    """Return a number of an objective in double precision, where it is: the host waits for no tensor."""
    return number.detach().double() if isinstance(number, torch.Tensor) else float(number)


def in_model_precision(data: object, plan: Plan) -> Any:
    """Return a batch in the model's precision: data sets give fp32, and only fp64 weights cannot take it."""
    return cast_floats(data, torch.float64) if plan.precision == "fp64" else data
