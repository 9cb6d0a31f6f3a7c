"""Less work: a rank that stays slow gets fewer rows of every batch, and the others more, by decision.

All ranks hear the same measurements and come to the same cut, between two steps. Rates are those of a window of
comparisons under one cut; a cut is left for a forecast gain alone, so that noise does not move rows to and fro; and the
run comes back to its plan's own cut when that is as good. What a cut has brought is told after the next window.
Ranks that outlive their world take their rates along, so that the next one begins with a cut of its own.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.plan.placement.recut import Recut, keeps_passes, recut, rows_of_ranks
from paceline.run.loop.under_plan import UnderPlan
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.plan import Plan, counts_text
from paceline.spec.survive.health import HealthSpec
from paceline.units import format_durations


@dataclass(frozen=True)
class OwnPace:
    """What a rank takes along from a world in which rows were cut by rates: its own, and how many cuts are left."""

    row_seconds: float
    cuts_left: int


class LessWork:
    """Decides on the rows of the data ranks of what trains, and changes its plan."""

    def __init__(self, health: HealthSpec, under: UnderPlan) -> None:
        self._gain, self._left = health.straggler_gain, health.straggler_cuts
        self._under, self._base = under, under.plan
        self._window: deque[list[tuple[float, float]]] = deque(maxlen=health.straggler_checks)
        self._made: Recut | None = None  # the last cut, until it is told what it has brought
        self._each: list[float] = []  # what each data rank took for a row when the rows were cut

    @staticmethod
    def of(health: HealthSpec, under: UnderPlan | None) -> LessWork | None:
        """Return who decides, where the run wants it and there are data ranks whose sums are exact."""
        if under is None or health.on_straggler != "less_work":
            return None
        return LessWork(health, under) if under.plan.layout.data_degree > 1 and under.plan.sync.is_plain else None

    def decided(
        self, step: int, seconds: Sequence[float], rows: Sequence[float], slow: Collection[int]
    ) -> list[DecisionRecord]:
        """Return what is decided after a comparison: each rank's computing seconds and rows of a step, and who is slow.

        A new cut holds from the next batch that is read. Every rank calls it with the same numbers.
        """
        self._window.append(list(zip(seconds, rows, strict=True)))
        if len(self._window) < (self._window.maxlen or 1):
            return []
        found = self._brought(step)
        now, each = self._under.plan, self._row_seconds()
        same_passes = keeps_passes(self._base) or self._under.sees_whole_batch
        change = recut(self._base, now, each, self._gain, may_leave=bool(slow), same_passes=same_passes)
        if change is None or not self._left:
            return found
        began = time.perf_counter()
        self._left -= 1
        self._cut(change, each)
        cost = time.perf_counter() - began
        who = f"rank {', '.join(map(str, sorted(slow)))} is slow" if slow else "no rank is slow any more"
        return [*found, self._record(step, now.rows, change, f"after step {step} {who}", cost)]

    @property
    def is_at_work(self) -> bool:
        """Whether rows are cut otherwise than by the run's plan, or it is still to be told what a cut has brought."""
        return self._made is not None or rows_of_ranks(self._under.plan) != rows_of_ranks(self._base)

    def nothing_told(self) -> None:
        """Take note of a comparison in which no rank was slow and nobody was asked: a window has no gaps."""
        self._window.clear()

    def rebase(self, plan: Plan) -> None:
        """Take the run's plan to be another, which differs in micro-batch and passes alone."""
        rows = self._base.rows
        self._base = dataclasses.replace(plan, rows=rows)
        self._window.clear()
        self._made = None

    def learnt(self, rank: int) -> OwnPace | None:
        """Return what a rank takes along to the next world; None where rows are those of the plan."""
        if rows_of_ranks(self._under.plan) == rows_of_ranks(self._base):
            return None
        return OwnPace(self._each[self._under.plan.layout.data_rank(rank)], self._left)

    def go_on(self, step: int, told: Sequence[OwnPace | None]) -> list[DecisionRecord]:
        """Return what is decided in a new world, by what each of its ranks has brought along.

        New ranks count as the median of the others. Every rank calls it with the same.
        """
        known = [each for each in told if each is not None]
        if not known:
            return []
        usual = statistics.median(each.row_seconds for each in known)
        layout = self._under.plan.layout
        each = [0.0] * layout.data_degree
        for rank, brought in enumerate(told):
            data_rank = layout.data_rank(rank)
            each[data_rank] = max(each[data_rank], brought.row_seconds if brought else usual)
        self._left = min(brought.cuts_left for brought in known)
        same_passes = keeps_passes(self._base) or self._under.sees_whole_batch
        change = recut(self._base, self._base, each, self._gain, may_leave=True, same_passes=same_passes)
        if change is None:
            return []
        self._cut(change, each)
        because = f"after step {step} the world is another, and its ranks are as fast as they were"
        return [self._record(step, self._base.rows, change, because, 0.0)]

    def _cut(self, change: Recut, each: list[float]) -> None:
        self._under.recut(change.plan)
        self._window.clear()
        self._made, self._each = change, each

    def _row_seconds(self) -> list[float]:
        """Return what each data rank takes for a row: its slowest rank's time, over the window."""
        layout = self._under.plan.layout
        found = [0.0] * layout.data_degree
        for rank in range(layout.devices):
            seconds, rows = (sum(told[rank][part] for told in self._window) for part in (0, 1))
            data_rank = layout.data_rank(rank)
            found[data_rank] = max(found[data_rank], seconds / rows, 1e-9)
        return found

    def _record(self, step: int, before: tuple[int, ...], change: Recut, why: str, cost: float) -> DecisionRecord:
        now, plan = before or rows_of_ranks(self._base), change.plan
        is_base = plan is self._base
        ahead, as_is = format_durations(change.seconds, change.now_seconds)
        because = f"{why}; a step computes for {ahead} by forecast, and {as_is} as it is"
        rows = rows_of_ranks(plan)
        evidence = {
            "step": step,
            "row_seconds": self._each,
            "rows": {"from": list(now), "to": list(rows)},
            "micro_batches": plan.accumulation,
            "computing_seconds": {"from": change.now_seconds, "to": change.seconds},
            "cost_seconds": cost,
            "cuts_left": self._left,
        }
        told = f"{counts_text(rows)} of each batch" + (", the plan's own cut" if is_base else "")
        return DecisionRecord("rows", counts_text(now), told, because, evidence)

    def _brought(self, step: int) -> list[DecisionRecord]:
        """Return what the last cut has brought, where that is not told yet."""
        if self._made is None:
            return []
        change, self._made = self._made, None
        count = len(self._window)
        measured = max(sum(told[rank][0] for told in self._window) / count for rank in range(len(self._window[0])))
        because = f"{counts_text(rows_of_ranks(change.plan))} of each batch, held against the forecast"
        evidence = {"step": step, "computing_seconds": {"forecast": change.seconds, "measured": measured}}
        before, after = format_durations(change.seconds, measured)
        return [DecisionRecord("rows", f"{before} forecast", f"a step computes for {after}", because, evidence)]
