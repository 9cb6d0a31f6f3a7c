"""Stragglers: ranks that compute longer than the others for the same work, named with what their devices tell.

Of a step's time only the time in which a rank computed counts: the others wait for a slow one, so all steps look alike
from outside. What is compared is the time for a row, since ranks may have different numbers of rows. What follows is
the run's option: the rank is named, it gets less work, or another process takes its place.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from paceline.errors import RankReplaced
from paceline.run.loop.loader import StepBatch
from paceline.run.loop.step import StepStats
from paceline.run.loop.under_plan import UnderPlan
from paceline.run.process.spread import spread_over
from paceline.run.process.world import World
from paceline.run.survive.health.computing import (
    computed_seconds,
    device_facts,
    passes_alone,
    planned_rows,
    rows_computed,
    standing_out,
)
from paceline.run.survive.health.less_work import LessWork, OwnPace
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.reading import read_kind
from paceline.spec.journal.records.decided import STRAGGLER
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.survive.health import HealthSpec
from paceline.supervise.supervisor import is_supervised

LEAST_STEPS = 4  # that a comparison is of
LEAST_SECONDS = 1e-9  # that ranks are taken to compute in a step
NOTHING = "nothing is done about it"


class Stragglers:
    """Adds up what this rank computes, and compares the ranks now and then."""

    def __init__(
        self, health: HealthSpec, world: World, under: UnderPlan | None = None, run_dir: Path | None = None
    ) -> None:
        """`under` is what trains, whose rows a slow rank may lose; `run_dir` has the journal of what was done."""
        self._factor, self._checks, self._world = health.straggler_factor, health.straggler_checks, world
        self._seconds, self._rows, self._steps = 0.0, 0, 0
        self._passes_alone = False
        self._slow: dict[int, int] = {}  # rank -> comparisons in a row in which it was slow
        self._under, self._run_dir, self._replaces = under, run_dir, health.on_straggler == "replace"
        self._planned = planned_rows(under.plan) if under is not None else [1.0] * world.size
        self._less_work = LessWork.of(health, under)
        self._leaving: int | None = None  # the rank whose place another process is to take

    def add(self, stats: StepStats, batch: StepBatch) -> None:
        """Add a step of this rank's, where it is known for how long it computed, and there are ranks to compare."""
        if self._world.size == 1:
            return
        if stats.waiting_seconds is None and self._steps == 0:  # for all steps until the next comparison
            self._passes_alone = passes_alone(self._under)
        seconds = computed_seconds(stats, self._passes_alone)
        if seconds is not None:
            self._seconds += seconds
            self._rows += rows_computed(batch)
            self._steps += 1

    def compare(self, step: int) -> list[DecisionRecord]:
        """Return who has just become known as slow, or no longer is, and what is done. Every rank calls it alike."""
        if self._world.size == 1 or self._steps < LEAST_STEPS:
            return []
        own = (self._seconds / self._steps, self._rows / self._steps)
        self._seconds, self._rows, self._steps = 0.0, 0, 0
        if not self._is_worth_asking(*own):
            return []
        told = self._world.gather((*own, device_facts(self._world.device)))
        seconds, rows = [each[0] for each in told], [each[1] for each in told]
        parts = [count / planned for count, planned in zip(rows, self._planned, strict=True)]
        found = self.judged(step, seconds, [each[2] for each in told], parts)
        if self._less_work is not None:
            found += self._less_work.decided(step, seconds, rows, self._named())
        return found

    def _is_worth_asking(self, seconds: float, rows: float) -> bool:
        """Return whether a rank is slow, was so the last time, or trains on other rows than planned.

        Where none of this is so, nothing follows from what each rank takes, and nobody asks. All ranks return the same.
        """
        if self._slow or (self._less_work is not None and self._less_work.is_at_work):
            return True
        rank, layout = self._world.rank, self._under.plan.layout if self._under is not None else Layout()
        own = seconds / (rows / self._planned[rank])
        columns: list[float | None] = [None] * layout.pp
        stage = layout.coordinates(rank)["pp"] if layout.pp > 1 else 0
        columns[stage] = own
        found = spread_over(self._world, [*columns, own])
        of_stage, of_all = found[stage], found[-1]
        peers = of_stage if of_stage is not None and of_stage.count > 1 else of_all
        assert peers is not None
        slow = own / max(peers.median_without(own), LEAST_SECONDS) >= self._factor
        asks = self._world.maximum([float(slow)])[0] > 0
        if not asks and self._less_work is not None:
            self._less_work.nothing_told()
        return asks

    def rebase(self, plan: Plan) -> None:
        """Take the run's plan to be another, which differs in micro-batch and passes alone."""
        self._planned = planned_rows(plan)
        self._seconds, self._rows, self._steps = 0.0, 0, 0
        if self._less_work is not None:
            self._less_work.rebase(plan)

    def learnt(self) -> OwnPace | None:
        """Return what this rank takes along to the next world of how fast it is, where rows were cut by that."""
        return self._less_work.learnt(self._world.rank) if self._less_work is not None else None

    def go_on(self, step: int, mine: OwnPace | None) -> list[DecisionRecord]:
        """Return what is decided in a world that survivors have formed, by what each brings. Every rank calls it."""
        return self._less_work.go_on(step, self._world.gather(mine)) if self._less_work is not None else []

    def judged(
        self, step: int, seconds: list[float], facts: list[dict[str, float]], parts: list[float] | None = None
    ) -> list[DecisionRecord]:
        """Return the decisions that follow from the seconds that each rank computed in a step.

        `parts` is what each rank had of the rows that the run's plan gives it; all of them where it is not given.
        """
        parts = parts or [1.0] * len(seconds)
        each = [own / part for own, part in zip(seconds, parts, strict=True)]
        found = []
        for rank, own in enumerate(each):
            others = statistics.median(self._peers(rank, each))
            times, known = own / max(others, LEAST_SECONDS), rank in self._named()
            evidence = {"rank": rank, "step": step, "times": times, "compute_seconds": seconds, "parts": parts,
                        "device": facts[rank]}  # fmt: skip
            because = f"rank {rank} computes {times:.2f} times as long for its part as the others in the median"
            if times < self._factor:
                if known:
                    found.append(DecisionRecord(STRAGGLER, "slow", "as fast as the others", because, evidence))
                self._slow.pop(rank, None)
                continue
            self._slow[rank] = self._slow.get(rank, 0) + 1
            if self._slow[rank] == self._checks:
                done, more = self._done_about(rank)
                after = f"slow; {done}"
                because += f"; of its device stands out: {told}" if (told := standing_out(facts[rank])) else ""
                found.append(DecisionRecord(STRAGGLER, "as fast as the others", after, because, {**evidence, **more}))
        return found

    def leave(self, save: Callable[[], object]) -> None:
        """Have all ranks save where the place of one is to be taken, and end that one by RankReplaced."""
        if self._leaving is None:
            return
        save()
        leaving, self._leaving = self._leaving, None
        if leaving == self._world.rank:
            raise RankReplaced(
                f"rank {leaving} of {self._world.size} was slow, and another process takes its place",
                "run.health.on_straggler is 'replace'",
            ).naming_ranks()

    def _named(self) -> set[int]:
        return {rank for rank, count in self._slow.items() if count >= self._checks}

    def _peers(self, rank: int, values: list[float]) -> list[float]:
        """Return the others' values: of ranks of the same pipeline stage, which have the same work, where there are."""
        others = [other for other in range(len(values)) if other != rank]
        if self._under is not None:
            stages = [self._under.plan.layout.coordinates(other)["pp"] for other in range(len(values))]
            others = [other for other in others if stages[other] == stages[rank]] or others
        return [values[other] for other in others]

    def _done_about(self, rank: int) -> tuple[str, dict[str, object]]:
        """Return what is done about a rank that has just been named, and what is to be remembered of it."""
        if self._less_work is not None:
            return "it gets less work as soon as that is worth it", {}
        if not self._replaces:
            return NOTHING, {}
        if not self._world.share(is_supervised()):
            return f"{NOTHING}: no supervisor of ours can replace it", {}
        if self._world.share(self._was_replaced(rank)):
            return f"{NOTHING}: the process before it was slow too, so its device is; less work would help", {}
        self._leaving = rank
        return "another process takes its place", {"replaced": rank}

    def _was_replaced(self, rank: int) -> bool:
        """Return whether the journal says that a process of the rank was replaced before; rank 0 alone reads it."""
        if self._run_dir is None or not self._world.is_first:
            return False
        known = read_kind(self._run_dir, DecisionRecord)
        return any(each.what == STRAGGLER and (each.evidence or {}).get("replaced") == rank for each in known)
