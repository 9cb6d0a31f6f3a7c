"""What one device computes in a story: its steps without a break, and the mean loss of the held-out samples after each.

Evaluation is written plainly: the samples one by one, their losses and weights added up, one division at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline.run.numerics.precision import MASTER_DTYPES, cast_floats
from paceline.run.process.world import World
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.data.order.permutation import sample_ids
from paceline.task.data.protocol import Source
from paceline.task.turns import objective_of
from paceline.verify.compare.asked import Asked
from paceline.verify.compare.diagnosis import Traits, traits_of
from paceline.verify.compare.difference import Difference, number_differences
from paceline.verify.compare.layout import is_finite
from paceline.verify.compare.tolerance import TOLERANCES
from paceline.verify.reference.steps import ReferenceStep, reference_steps
from paceline.verify.rounding.conditioning import Again, Move, computed_again, steps_apart
from paceline.verify.story.plans import SAVED, expected_factor, expected_rate, story_sizes

IN_JOURNAL = "in the journal"
HELD_OUT_SEED = 0  # of the order in which held-out samples are taken: the same in every run


@dataclass(frozen=True)
class Passed:
    """One step of the device, the learning rate that belongs to it, and the loss on held-out samples after it.

    The loss is NaN where it is not a sum over samples: it then depends on which of them are read together.
    """

    number: int
    step: ReferenceStep
    rate: float
    evaluation: float
    start: dict[str, torch.Tensor]  # weights before the first step


@dataclass(frozen=True)
class Unbroken:
    """The steps of one device without a break and the model's traits; empty on ranks that did not compute them."""

    passed: tuple[Passed, ...] = ()
    traits: Traits | None = None

    def overflows(self) -> int:
        """Return the first 1-based step whose numbers are none, 0 where all are; rank 0's is the one that counts."""
        return next((at for at, passed in enumerate(self.passed, 1) if not is_finite(passed.step)), 0)

    def at(self, step: int, world: World) -> Passed:
        """Return a 1-based step. Every rank of a world calls it; rank 0's is the one that counts."""
        passed = world.share(self.passed[step - 1] if self.passed else None)
        assert isinstance(passed, Passed)
        return passed


def unbroken(asked: Asked, last: Plan, samples: int, move: Move | None = None) -> Unbroken:
    """Return the story's steps on one device; the last one reads its rows in the micro-batches of the plan `last`.

    The task's data are a pair of sources; the first `samples` of the second are evaluated after every step. With `move`
    the weights at the start are moved.
    """
    task, plan = asked.task, asked.plan
    model = asked.model(move)
    traits = traits_of(model)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    sizes = story_sizes(task.growth, plan)

    def rate(step: int) -> float:
        grown = expected_factor(task.growth, sizes[step - 1], sizes[0])
        return expected_rate(task.schedule, task.optimizer.lr, step) * grown

    given = (task, plan, asked.source, asked.items_per_sample, SAVED + 1, model)
    steps = reference_steps(*given, rate=rate, last=last, sizes=sizes)
    evaluations = _evaluations(task, plan, model, steps, task.data[1], samples)
    passed = [
        Passed(number, dataclasses.replace(step, gradients={}), rate(number), loss, start)
        for number, (step, loss) in enumerate(zip(steps, evaluations, strict=True), 1)
    ]
    return Unbroken(tuple(passed), traits)


def in_the_journal(difference: Difference) -> Difference:
    """Return the difference as that of a number which the journal keeps."""
    return dataclasses.replace(difference, name=f"{difference.name} {IN_JOURNAL}")


def unbroken_again(asked: Asked, last: Plan, samples: int) -> Again:
    """Return how one device computes the same story again."""

    def computed(made: int, move: Move | None) -> Sequence[Passed]:
        return unbroken(asked, last, samples, move).passed[:made]

    return computed_again(computed, _apart, asked.narrowest)


def _apart(ours: Sequence[Passed], known: Sequence[Passed]) -> Iterator[Difference]:
    alone = World(0, 1, 0, torch.device("cpu"))
    for one, other in zip(ours, known, strict=True):
        apart = steps_apart(one.step, other.step, (one.start, other.start), other.number)
        apart += number_differences(
            {"evaluation": one.evaluation}, {"evaluation": other.evaluation}, other.number, alone
        )
        yield from apart
        yield from (in_the_journal(difference) for difference in apart)


@torch.no_grad()
def _evaluations(
    task: Task, plan: Plan, model: nn.Module, steps: Sequence[ReferenceStep], held_out: Source, samples: int
) -> list[float]:
    """Return the mean loss over the first held-out samples of their order, with the weights after each step."""
    objective = objective_of(task, held_out.unit)
    count = min(samples, held_out.samples)
    ids = sample_ids(HELD_OUT_SEED, np.arange(count, dtype=np.int64), held_out.samples)

    def read(chosen: npt.NDArray[np.int64]) -> Any:
        return cast_floats(held_out.read(chosen, chosen), MASTER_DTYPES[plan.precision])

    singly, together = [read(ids[at : at + 1]) for at in range(count)], read(ids)
    model.eval()
    means = []
    for step in steps:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(step.weights[name] if name in step.weights else step.buffers[name])
        sums = [objective(model, row) for row in singly]
        mean = sum(float(loss) for loss, _ in sums) / sum(float(weight) for _, weight in sums)
        loss, weight = objective(model, together)
        apart = abs(float(loss) / float(weight) - mean)
        means.append(mean if apart <= TOLERANCES["evaluation"]["fp32"] * abs(mean) else math.nan)
    return means
