"""One device takes the copies of a model in turn and brings them together as a plan's `sync` says, written out plainly.

With an outer step each copy is a model of its own, and torch's SGD moves the weights they share. With gradients that
are sent in bf16 the copies are one model, whose gradient is the sum of what each copy would send.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from paceline.run.numerics.precision import MASTER_DTYPES
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.data.protocol import Source
from paceline.task.optimizer.schedule import learning_rate
from paceline.task.turns import turns_of
from paceline.verify.reference.passes import backward, micro_batches, reference_model, reference_randomness, update
from paceline.verify.reference.plain_optimizer import plain_optimizers

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CopiesStep:
    """One step's numbers: the mean loss over all copies and the items that it is over, the root of the mean square of
    the norms of their mean gradients, and what each copy holds when the step is over.
    """

    loss: float
    weight: float
    grad_norm: float
    weights: list[Weights]


@dataclass
class _Copy:
    """A model that takes steps: one copy, or what all copies have in common."""

    model: nn.Module
    backward: Callable[[int, int], tuple[float, float]]  # (step, copy) -> sums of losses and weights; gradients add up
    updates: list[tuple[torch.optim.Optimizer, float]]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of every trained parameter, zeros where the passes did not reach it."""
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.trained()]

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def step(self, weight: float, clip_norm: float, lr: float) -> float:
        """Update by the gradients divided by the weight, and return the norm of these before they are clipped.

        Without an item there is nothing to update by, and the norm is 0.
        """
        if not weight:
            return 0.0
        reached = [p for p in self.trained() if p.grad is not None]
        for parameter in reached:
            assert parameter.grad is not None
            parameter.grad.div_(weight)
        norms = [torch.linalg.vector_norm(parameter.grad) for parameter in reached if parameter.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(reached, clip_norm)
        update(self.updates, lr)
        return norm

    def held(self) -> Weights:
        """Return copies of the weights."""
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}


def copies_steps(task: Task, plan: Plan, source: Source, items_per_sample: int, steps: int) -> list[CopiesStep]:
    """Return the numbers of so many steps of a task of one objective, its copies kept in step as the plan says."""
    count = plan.layout.dp_replicate
    run = _outer_steps if plan.sync.has_outer_step else _rounded_steps
    models = count if plan.sync.has_outer_step else 1
    copies = [_copy(task, plan, source, items_per_sample) for _ in range(models)]
    rates = [learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1) for step in range(1, steps + 1)]
    return list(run(copies, plan, task.optimizer.clip_norm, rates))


def first_norm(task: Task, plan: Plan, source: Source, items_per_sample: int) -> float:
    """Return the norm of the first copy's mean gradient in the first step: some copies' norms are above it."""
    copy = _copy(task, plan, source, items_per_sample)
    _, weight = copy.backward(1, 0)
    return float(torch.nn.utils.get_total_norm(copy.gradients())) / weight


def _copy(task: Task, plan: Plan, source: Source, items_per_sample: int) -> _Copy:
    model = reference_model(task, source, items_per_sample, MASTER_DTYPES[plan.precision])
    (turn,) = turns_of(task, source.unit)
    dtype = MASTER_DTYPES[plan.precision]
    randomness = reference_randomness(task, plan, source, model, [turn.objective], dtype)
    shards = plan.layout.dp_shard

    def passes(step: int, copy: int) -> tuple[float, float]:
        ranks = range(copy * shards, (copy + 1) * shards)
        read: Iterator[tuple[np.ndarray, object]] = micro_batches(task, plan, source, step, False, ranks)
        return backward(model, turn, read, randomness, dtype, step)

    return _Copy(model, passes, plain_optimizers(task.optimizer, model, list(model.parameters())))


def _outer_steps(copies: list[_Copy], plan: Plan, clip_norm: float, rates: list[float]) -> Iterator[CopiesStep]:
    sync = plan.sync
    shared = [p.detach().clone() for p in copies[0].trained()]
    outer = torch.optim.SGD(shared, lr=sync.lr, momentum=sync.momentum, nesterov=sync.momentum > 0)
    for step, rate in enumerate(rates, 1):
        sums, norms = [], []
        for number, copy in enumerate(copies):
            sums.append(copy.backward(step, number))
            norms.append(copy.step(sums[-1][1], clip_norm, rate))
        if not sync.differs_after(step):
            with torch.no_grad():
                for weight, *held in zip(shared, *(copy.trained() for copy in copies), strict=True):
                    weight.grad = torch.stack([weight - one for one in held]).mean(0)
                outer.step()
                for weight, *held in zip(shared, *(copy.trained() for copy in copies), strict=True):
                    for one in held:
                        one.copy_(weight)
        norm = math.sqrt(sum(one**2 for one in norms) / len(norms))
        yield CopiesStep(_mean(sums), _items(sums), norm, [copy.held() for copy in copies])


def _rounded_steps(copies: list[_Copy], plan: Plan, clip_norm: float, rates: list[float]) -> Iterator[CopiesStep]:
    (model,), count = copies, plan.layout.dp_replicate
    left = [[torch.zeros_like(p) for p in model.trained()] for _ in range(count)]
    for step, rate in enumerate(rates, 1):
        sums, totals = [], [torch.zeros_like(p) for p in model.trained()]
        for number in range(count):
            sums.append(model.backward(step, number))
            for total, kept, gradient in zip(totals, left[number], model.gradients(), strict=True):
                sent = (gradient + kept).bfloat16().to(gradient.dtype)
                kept.add_(gradient - sent)
                total.add_(sent)
        for parameter, total in zip(model.trained(), totals, strict=True):
            parameter.grad = total
        norm = model.step(_items(sums), clip_norm, rate)
        yield CopiesStep(_mean(sums), _items(sums), norm, [model.held()] * count)


def _mean(sums: list[tuple[float, float]]) -> float:
    return sum(loss for loss, _ in sums) / _items(sums)


def _items(sums: list[tuple[float, float]]) -> float:
    return sum(weight for _, weight in sums)


def clipped_at(task: Task, clip_norm: float) -> Task:
    """Return the task with another norm above which gradients are scaled down."""
    return dataclasses.replace(task, optimizer=dataclasses.replace(task.optimizer, clip_norm=clip_norm))
