"""Device-seconds of a run: how many devices it held at each moment, and what they did.

Devices times seconds, summed over the kinds, are exactly the devices times the time in which they were held
(spec/journal/held.py); what no record claims is starting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.report.phases import lost_mask
from paceline.report.records import Records, number
from paceline.spec.journal.held import HeldTime, held_time
from paceline.spec.journal.kinds import CheckpointRecord, EvaluationRecord, RecoveryRecord

# What devices do while they are held. `useful`: steps that count, and evaluations. `stall`: waiting for data. `lost`:
# steps made again. `checkpoint`: waiting for one. `restart`: starting, building, and recovering from faults.
KINDS = ("useful", "stall", "lost", "checkpoint", "restart")


@dataclass(frozen=True)
class SpentTime:
    """A stretch of held time, and its seconds by kind, which add up to it."""

    held: HeldTime
    seconds: dict[str, float]


def held_devices(records: Records) -> list[HeldTime]:
    """Return when the run held how many devices, in order and without an overlap."""
    return held_time(records.starts, records.spans, records.of(RecoveryRecord))


def stretches(records: Records) -> list[SpentTime]:
    """Return the run's held time with what the devices did in it. Kinds add up to each stretch."""
    held = held_devices(records)
    if not held:
        return []
    found = [dict.fromkeys(KINDS, 0.0) for _ in held]
    ends = np.array([each.ended for each in held])

    def add(moments: np.ndarray, seconds: np.ndarray, kind: str) -> None:
        known = np.isfinite(moments) & np.isfinite(seconds)
        places = np.minimum(np.searchsorted(ends, moments[known]), len(held) - 1)
        for place, total in enumerate(np.bincount(places, seconds[known], len(held)).tolist()):
            found[place][kind] += total

    steps, lost = records.steps, lost_mask(records)
    moments, total = steps.column("time"), np.nan_to_num(steps.column("total"))
    waited = np.minimum(np.nan_to_num(steps.column("data")), total)
    add(moments[~lost], (total - waited)[~lost], "useful")
    add(moments[~lost], waited[~lost], "stall")
    add(moments[lost], total[lost], "lost")
    evaluations = [(number(record.time), number(record.seconds)) for record in records.of(EvaluationRecord)]
    saves = [(number(record.time), number(record.cost_seconds)) for record in records.of(CheckpointRecord)]
    for kind, pairs in (("useful", evaluations), ("checkpoint", saves)):
        own = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
        add(own[:, 0], own[:, 1], kind)
    return [SpentTime(each, _whole(each.seconds, seconds)) for each, seconds in zip(held, found, strict=True)]


def _whole(seconds: float, kinds: dict[str, float]) -> dict[str, float]:
    """Return the kinds with what none of them claims as restart; where they claim too much, in their proportion."""
    claimed = sum(kinds.values())
    if claimed > seconds:
        return {kind: value * seconds / claimed for kind, value in kinds.items()}
    return {**kinds, "restart": kinds["restart"] + seconds - claimed}
