"""Another cut of a batch over the data ranks of a run, by the seconds for a row that were measured of every rank.

A step divides by the weight summed over all ranks, so the cut changes no number of the training but by rounding. The
micro-batch stays as large as it was, and with it a pass's memory: where a rank gets more rows, all ranks make more
passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.feasible.stages import fill_pipeline
from paceline.plan.placement.shares import share_out
from paceline.spec.plan import Plan


@dataclass(frozen=True)
class Recut:
    """A plan of another cut, and for how long the rank that computes longest does so in a step: forecast, and now."""

    plan: Plan
    seconds: float
    now_seconds: float


def recut(
    base: Plan, now: Plan, row_seconds: Sequence[float], least_gain: float, *, may_leave: bool, same_passes: bool
) -> Recut | None:
    """Return the cut that is worth the change, or None.

    `row_seconds` is what each data rank takes for a row. The cut of `base`, the run's plan, is left only where
    `may_leave` says so, and for a forecast gain of `least_gain`; so is one other cut for another. The run comes back to
    `base` when no other cut has that gain over it, and it is no slower than that of `now`. `same_passes` says that the
    number of passes must stay.
    """
    best = min(_cuts(base, row_seconds, same_passes), key=lambda plan: computing_seconds(plan, row_seconds))
    at_base, at_best, at_now = (computing_seconds(plan, row_seconds) for plan in (base, best, now))
    is_base = rows_of_ranks(now) == rows_of_ranks(base)
    if at_base <= at_best * (1 + least_gain):
        return None if is_base or at_base > at_now else Recut(base, at_base, at_now)
    if (is_base and not may_leave) or at_now <= at_best * (1 + least_gain):
        return None
    return Recut(best, at_best, at_now)


def keeps_passes(plan: Plan) -> bool:
    """Return whether more passes would take memory that the plan was not priced with.

    GPipe holds what all micro-batches keep, and a plan that reduces once whole gradients between two passes.
    """
    layout = plan.layout
    holds_all = layout.pp > 1 and plan.schedule == "gpipe"
    return holds_all or (layout.state_degree > 1 and plan.reduces_once and plan.accumulation == 1)


def rows_of_ranks(plan: Plan) -> tuple[int, ...]:
    """Return how many rows of a global batch each data rank reads."""
    return tuple(len(plan.rows_of(data_rank)) for data_rank in range(plan.layout.data_degree))


def computing_seconds(plan: Plan, row_seconds: Sequence[float]) -> float:
    """Return for how long the rank that computes longest does so in a step. Each pass has a row, if a stand-in."""
    pairs = zip(rows_of_ranks(plan), row_seconds, strict=True)
    return max(max(rows, plan.accumulation) * seconds for rows, seconds in pairs)


def _cuts(base: Plan, row_seconds: Sequence[float], same_passes: bool) -> list[Plan]:
    """Return the cut in proportion to the ranks' speeds, and those in which fewer passes bound what a rank has."""
    speeds = [1 / seconds for seconds in row_seconds]
    free = _passes(base, share_out(base.batch_samples, speeds, least=1))
    most = base.accumulation if same_passes else max(base.accumulation, free)
    found = []
    for passes in {fill_pipeline(count, base.layout.pp, base.schedule) for count in range(base.accumulation, most + 1)}:
        limit = passes * base.micro_batch
        if limit * base.layout.data_degree >= base.batch_samples:
            rows = share_out(base.batch_samples, speeds, least=1, most=limit)
            found.append(dataclasses.replace(base, rows=rows, accumulation=passes))
    return found or [base]


def _passes(base: Plan, rows: Sequence[int]) -> int:
    return -(-max(rows) // base.micro_batch)
