"""The micro-batch of a plan: which ones are worth a try, and which of those that were tried is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.cost.memory.usable import needed_terms, usable_bytes
from paceline.plan.cost.pricing import memory_of
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.feasible.micro_batch import with_micro_batch
from paceline.plan.feasible.refusals import refusal
from paceline.spec.plan import Plan

LEAST_GAIN = 0.02  # of a step, that a larger micro-batch must save: forecasts and clocks tell no less apart


@dataclass(frozen=True)
class TriedMicroBatch:
    """A micro-batch whose steps were made and timed: the seconds of the same samples, and how far they spread."""

    micro_batch: int
    seconds: float
    spread: float  # of the middle half of the repeats, over their median
    peak_bytes: float


def worth_a_try(context: PricedTask, plan: Plan) -> tuple[int, ...]:
    """Return the plan's micro-batch, half and twice as much where the plan can have them, in rising order.

    Twice as much is left out where it does not fit by forecast.
    """
    found = [plan.micro_batch]
    for size in (plan.micro_batch // 2, 2 * plan.micro_batch):
        changed = with_micro_batch(plan, size) if size else plan
        held = sum(term.value for term in needed_terms(context.cluster, memory_of(context, changed)))
        fits = size < plan.micro_batch or held <= usable_bytes(context.cluster)
        if changed.micro_batch == size and fits and refusal(changed, context.profile) is None:
            found.append(size)
    return tuple(sorted(found))


def taken(tried: Sequence[TriedMicroBatch]) -> TriedMicroBatch:
    """Return the micro-batch to take of those that were tried: a larger one only where it is measurably faster.

    The gain must be more than `LEAST_GAIN` and than either's repeats spread.
    """
    best, *larger = sorted(tried, key=lambda each: each.micro_batch)
    for each in larger:
        if each.seconds < best.seconds * (1 - max(LEAST_GAIN, best.spread, each.spread)):
            best = each
    return best
