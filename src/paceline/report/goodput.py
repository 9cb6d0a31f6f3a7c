"""Goodput: the part of a run's time that training needed, what the rest went to, and what theory expects of that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.phases import Phase
from paceline.report.records import Records, number
from paceline.simulate.interval import expected_time
from paceline.spec.journal.kinds import CheckpointRecord, RecoveryRecord
from paceline.units import format_seconds

USEFUL = ("training", "data", "evaluation")  # phases that a run without an interruption has too
LOST, STALLS = "lost work", "checkpoints"


@dataclass(frozen=True)
class MeasuredGoodput:
    """Where a run's wall time went, in seconds; the kinds add up to it. Faults are those that it went on from.

    `expected` is the goodput that the same work would have with as many faults, recoveries and checkpoints of the mean
    lengths measured here, were faults to come at random: Daly's expected time (simulate/interval.py). None of a run
    without a fault.
    """

    wall_seconds: float
    useful_seconds: float
    lost_seconds: float  # steps made again
    recovery_seconds: float  # from a fault to the first step after it
    stall_seconds: float  # waiting for checkpoints
    other_seconds: float  # starting, proving, and time between starts
    faults: int
    expected: float | None

    @property
    def share(self) -> float:
        """Useful time over wall time."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds else 1.0


def goodput_of(records: Records, phases: Sequence[Phase]) -> MeasuredGoodput:
    """Return a run's goodput, from its phases and the recoveries on record."""
    seconds = {phase.name: phase.seconds for phase in phases}
    wall = sum(seconds.values())
    recoveries = records.of(RecoveryRecord)
    # The first step after a fault counts as a step.
    back = [(record.seconds.get("total") or 0.0) - (record.seconds.get("step") or 0.0) for record in recoveries]
    useful = sum(seconds.get(name, 0.0) for name in USEFUL)
    lost, stalls = seconds.get(LOST, 0.0), seconds.get(STALLS, 0.0)
    recovery = min(max(0.0, wall - useful - lost - stalls), sum(back))
    other = max(0.0, wall - useful - lost - stalls - recovery)
    expected = _expected(records, useful, useful + lost + stalls + recovery, back)
    return MeasuredGoodput(wall, useful, lost, recovery, stalls, other, len(recoveries), expected)


def _expected(records: Records, work: float, exposed: float, back: Sequence[float]) -> float | None:
    """Return what goodput theory expects of so much work, exposed to these faults; None without any, or unknown."""
    saves = [record for record in records.of(CheckpointRecord) if record.tier is None]
    steps = len(set(records.steps.column("step")))
    saved_at = sorted({record.step for record in saves if record.step})
    if not back or not steps or not saved_at or not work:
        return None
    between = statistics.median(after - before for before, after in zip([0, *saved_at], saved_at, strict=False))
    stall = statistics.fmean(number(record.cost_seconds) or 0.0 for record in saves)
    write = statistics.fmean(number(record.seconds) or 0.0 for record in saves)
    time = expected_time(
        work, between * work / steps, stall, exposed / len(back), statistics.fmean(back), max(0.0, write - stall)
    ).mean
    return work / time if math.isfinite(time) and time else None


def goodput_text(goodput: MeasuredGoodput) -> str:
    """Return a run's goodput in one line."""
    kinds = (
        ("lost", goodput.lost_seconds), ("recovery", goodput.recovery_seconds), ("checkpoints", goodput.stall_seconds),
        ("starting and other", goodput.other_seconds),
    )  # fmt: skip
    rest = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in kinds if seconds > 0)
    text = f"{goodput.share:.1%} (useful {format_seconds(goodput.useful_seconds)}" + (f", {rest})" if rest else ")")
    if goodput.expected is None:
        return text
    measured = 1.0 - goodput.other_seconds / goodput.wall_seconds
    faults = f"{goodput.faults} fault{'s' if goodput.faults > 1 else ''}"
    return f"{text}; {faults}, for which theory expects {goodput.expected * measured:.1%}"
