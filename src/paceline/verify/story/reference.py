"""What one device computes in a story: steps without a break, and what held-out samples give after every step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.run.process.world import World
from paceline.spec.plan import Plan
from paceline.verify.compare.asked import Asked
from paceline.verify.compare.diagnosis import Traits, traits_of
from paceline.verify.compare.difference import Difference
from paceline.verify.compare.layout import is_finite
from paceline.verify.compare.measures import number_differences
from paceline.verify.reference.noise_scale import NoiseEstimate, NoiseScale
from paceline.verify.reference.steps import ReferenceStep, reference_steps
from paceline.verify.rounding.conditioning import Again, Move, computed_again, steps_apart
from paceline.verify.story.evaluated import Evaluated, evaluations
from paceline.verify.story.plans import expected_factor, expected_rate, planned_steps, story_sizes

NOISE_NUMBERS = ("covariance_trace", "gradient_square")  # of what a run measures before its batch grows


@dataclass(frozen=True)
class Passed:
    """One step of the device, the learning rate that belongs to it, and what held-out samples give after it."""

    number: int
    step: ReferenceStep
    rate: float
    evaluation: Evaluated
    start: dict[str, torch.Tensor]  # weights and buffers before the first step
    growth: NoiseEstimate | None = None  # where the noise scale has made the batch grow after the step


@dataclass(frozen=True)
class Unbroken:
    """The steps of one device without a break and the model's traits; empty on ranks that did not compute them."""

    passed: tuple[Passed, ...] = ()
    traits: Traits | None = None
    sizes: tuple[int, ...] = ()  # samples of every step

    def overflows(self) -> int:
        """Return the first 1-based step whose numbers are none, 0 where all are; rank 0's is the one that counts."""
        return next((at for at, passed in enumerate(self.passed, 1) if not is_finite(passed.step)), 0)

    def changed(self) -> set[str]:
        """Return the names of the weights that evaluations change."""
        return {name for passed in self.passed for name in passed.evaluation.changed}

    def at(self, step: int, world: World) -> Passed:
        """Return a 1-based step. Every rank of a world calls it; rank 0's is the one that counts."""
        passed = world.share(self.passed[step - 1] if self.passed else None)
        assert isinstance(passed, Passed)
        return passed


def unbroken(asked: Asked, last: Plan, samples: int, move: Move | None = None, until: int = 0) -> Unbroken:
    """Return the story's steps on one device; the last one reads its rows in the micro-batches of the plan `last`.

    The task's data are a pair of sources; the first `samples` of the second are evaluated after every step. With `move`
    the weights at the start are moved, and with `until` that step is the last one made.
    """
    task, plan = asked.task, asked.plan
    model = asked.model(move)
    traits = traits_of(model)
    held = itertools.chain(model.named_parameters(), model.named_buffers())
    start = {name: tensor.detach().clone() for name, tensor in held}

    known = story_sizes(task, plan)
    made, planned = len(known), planned_steps(known)
    noise = NoiseScale(task.growth, [plan.batch_samples]) if task.growth.by == "noise" else None
    sizes: Sequence[int] = noise.sizes if noise is not None else known

    def rate(step: int) -> float:
        grown = expected_factor(task.growth, sizes[step - 1], sizes[0])
        return expected_rate(task.schedule, task.optimizer.lr, step, planned) * grown

    given = (task, plan, asked.source, asked.items_per_sample, made, model)
    selects = task.selection.selects
    steps = reference_steps(*given, rate=rate, last=last, sizes=sizes, noise=noise, selects=selects, until=until)
    states = [{**step.buffers, **step.weights} for step in steps]
    evaluated = evaluations(task, plan, model, states, task.data[1], samples)
    passed = [
        Passed(
            number,
            dataclasses.replace(step, gradients={}),
            rate(number),
            found,
            start,
            noise.decided.get(number) if noise is not None else None,
        )
        for number, (step, found) in enumerate(zip(steps, evaluated, strict=True), 1)
    ]
    return Unbroken(tuple(passed), traits, tuple(sizes[:made]))


def in_the_journal(difference: Difference) -> Difference:
    """Return the difference as that of a number which the journal keeps."""
    return dataclasses.replace(difference, name=journal_name(difference.name), in_journal=True)


def journal_name(name: str) -> str:
    """Return what a number of the journal is called, to be told from the number that the run has."""
    return f"{name} in the journal"


def evaluation_differences(
    ours: Mapping[str, float], expected: Evaluated, number: int, world: World, reach: float
) -> list[Difference]:
    """Return how far the numbers of an evaluation, by name, are from the device's. Every rank calls it.

    `reach` is what the loss of a step counts as at least, and that of an evaluation too.
    """
    reference = expected.numbers()
    known = {name: ours.get(name, math.nan) for name in reference}
    found = number_differences(known, reference, number, world, reach)
    return [dataclasses.replace(difference, quantity="evaluation") for difference in found]


def growth_differences(
    evidence: Mapping[str, float | None], expected: NoiseEstimate | None, number: int, world: World
) -> list[Difference]:
    """Return how far what a run measured before its batch grew is from the device's. Every rank calls it.

    Both numbers are differences of others, which say how large an error is.
    """
    if expected is None:
        return []  # a batch that grows where one device's does not has other samples
    sizes = (expected.noise, expected.noise_size), (expected.signal, expected.signal_size)
    pairs = dict(zip(NOISE_NUMBERS, sizes, strict=True))
    reference = {name: value + size for name, (value, size) in pairs.items()}
    ours = {name: _or_nan(evidence.get(name)) + size for name, (_, size) in pairs.items()}
    found = number_differences(ours, reference, number, world)
    return [dataclasses.replace(difference, quantity="grad_norm") for difference in found]


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def unbroken_again(asked: Asked, last: Plan, samples: int) -> Again:
    """Return how one device computes the same story again."""

    def computed(made: int, move: Move | None) -> Sequence[Passed]:
        return unbroken(asked, last, samples, move, made).passed

    return computed_again(computed, _apart, asked.narrowest)


def _apart(ours: Sequence[Passed], known: Sequence[Passed]) -> Iterator[Difference]:
    alone = World(0, 1, 0, torch.device("cpu"))
    for one, other in zip(ours, known, strict=True):
        apart = steps_apart(one.step, other.step, (one.start, other.start), other.number)
        evaluated = one.evaluation.numbers()
        apart += evaluation_differences(evaluated, other.evaluation, other.number, alone, other.step.reach)
        yield from apart
        yield from (in_the_journal(difference) for difference in apart)
