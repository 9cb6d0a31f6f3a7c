"""How the global batch grows during a run, as the Task asks: by a schedule, or by the measured gradient noise scale.

The batch of a step is a function of the step and of the samples before it, and of what was decided on the way, which
checkpoints hold. So every start, and every layout, makes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError
from paceline.units import Amount

RATES = ("linear", "sqrt", "none")


@dataclass(frozen=True)
class BatchChange(Declared, table="task.growth.changes"):
    """Another global batch, from a place in the training on."""

    after: Amount | None = option(
        None,
        "steps, samples or tokens after which it holds",
        quantity="amount",
        units=("steps", "samples", "tokens"),
    )
    batch: Amount | None = option(
        None, "samples or tokens in one update from there on", quantity="amount",
        units=("samples", "tokens"),
    )  # fmt: skip


@dataclass(frozen=True)
class GrowthSpec(Declared, table="task.growth"):
    """The `[task.growth]` table: whether and how the global batch grows. It begins at `task.global_batch`."""

    by: str = option(
        "nothing",
        "what it grows by: nothing, the `changes` below (schedule), or the gradient noise scale (noise), which doubles"
        " it where the noise scale is that large",
        choices=("nothing", "schedule", "noise"),
    )
    learning_rate: str = option(
        "linear",
        "what the learning rate is multiplied by, of the batch over the first one: the ratio (linear), its root (sqrt),"
        " or nothing (none)",
        choices=RATES,
    )
    changes: tuple[BatchChange, ...] = option((), "schedule: the batches and where they begin, in order")
    largest: Amount | None = option(None, "noise: the largest batch", quantity="amount", units=("samples", "tokens"))
    noise_ratio: float = option(
        1.0, "noise: the batch doubles where the noise scale is so many times the batch", above=0.0
    )
    measure_every: int = option(10, "noise: steps between two measurements", minimum=1)
    measurements: int = option(10, "noise: measurements that an estimate averages over", minimum=2)

    @property
    def grows(self) -> bool:
        """Whether the batch grows at all."""
        return self.by != "nothing"


@dataclass(frozen=True)
class Piece:
    """Where a batch begins to hold, in steps made or in samples consumed, and how many samples it has."""

    steps: int | None
    samples: int | None
    batch: int

    def has_begun(self, step: int, position: int) -> bool:
        """Return whether the piece has begun by update `step` (from 1), with `position` samples consumed before."""
        return step > self.steps if self.steps is not None else position >= (self.samples or 0)


@dataclass(frozen=True)
class BatchCourse:
    """The samples of every global batch, as far as a schedule says: a pure function of step and position."""

    first: int
    pieces: tuple[Piece, ...] = ()

    def at(self, step: int, position: int) -> int:
        """Return the samples of update `step`, before which `position` samples are consumed."""
        return next((each.batch for each in reversed(self.pieces) if each.has_begun(step, position)), self.first)

    def stretches(self, steps: int | None = None, samples: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (steps, batch) of runs of equal batches: so many steps, or the fewest that cover so many samples."""
        step = position = 0
        while (steps is not None and step < steps) or (samples is not None and position < samples):
            batch = self.at(step + 1, position)
            ends = [math.inf if steps is None else steps - step]
            ends += [] if samples is None else [-(-(samples - position) // batch)]
            for each in self.pieces:
                if not each.has_begun(step + 1, position):
                    ends.append(each.steps - step if each.steps is not None
                                else -(-((each.samples or 0) - position) // batch))  # fmt: skip
            count = int(max(1, min(ends)))
            yield count, batch
            step, position = step + count, position + count * batch

    def steps_for(self, samples: int) -> int:
        """Return the fewest steps that cover so many samples."""
        return sum(count for count, _ in self.stretches(samples=samples))


def course_of(growth: GrowthSpec, first: int, items_per_sample: int) -> BatchCourse:
    """Return the batches of a schedule. Raises ConfigError for one whose amounts are not whole, or not in order."""
    pieces: list[Piece] = []
    for number, change in enumerate(growth.changes if growth.by == "schedule" else (), 1):
        where = f"task.growth.changes {number}"
        if change.after is None or change.batch is None:
            missing = "after" if change.after is None else "batch"
            raise ConfigError(f"{where} has no `{missing}`", "a change is another batch and where it begins",
                              '{ after = "1000 steps", batch = "512 samples" }')  # fmt: skip
        batch = whole_samples(change.batch, items_per_sample, f"{where}: batch")
        if change.after.unit == "steps":
            piece = Piece(int(change.after.value), None, batch)
        else:
            per_sample = items_per_sample if change.after.unit == "tokens" else 1
            piece = Piece(None, math.ceil(change.after.value / per_sample), batch)
        before = pieces[-1] if pieces else None
        same_unit = before is None or (before.steps is None) == (piece.steps is None)
        if not same_unit or (before and _place(piece) <= _place(before)):
            raise ConfigError(
                f"{where} begins after {change.after}", "changes stand in order, and all in steps or none",
                "an amount above the one before",
            )  # fmt: skip
        pieces.append(piece)
    return BatchCourse(first, tuple(pieces))


def whole_samples(amount: Amount, items_per_sample: int, what: str) -> int:
    """Return the samples of an amount. Raises ConfigError where they are not whole, or none."""
    per_sample = 1 if amount.unit == "samples" else items_per_sample
    samples = amount.value / per_sample
    if samples < 1 or samples != int(samples):
        nearest = max(1, round(samples)) * per_sample
        raise ConfigError(
            f"{what} = '{amount}' is not a whole number of samples",
            f"a sample has {per_sample} {amount.unit}",
            f'"{nearest} {amount.unit}"',
        )
    return int(samples)


def rate_factor(rule: str, batch: int, first: int) -> float:
    """Return what the learning rate is multiplied by at a batch.

    Linear: Goyal et al. 2017, arXiv 1706.02677, section 2.1. Square root: Krizhevsky 2014, arXiv 1404.5997, section 5.
    """
    ratio = batch / first
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]


def _place(piece: Piece) -> int:
    return piece.steps if piece.steps is not None else piece.samples or 0
