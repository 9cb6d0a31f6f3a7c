"""Device-seconds of a run: how many devices the run held at a moment, and what these devices did.

Devices times seconds, summed over the kinds, are exactly the devices times the time in which they were held
(spec/journal/timing/held_devices.py); what no record claims is starting before the first step of a start and while a
fault is recovered from, and idle after that.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.account.starting import unclaimed_starting
from paceline.history.phases import lost_mask
from paceline.history.records import Records, number
from paceline.spec.journal.kinds import CheckpointRecord, EvaluationRecord, RecoveryRecord
from paceline.spec.journal.timing.held_devices import HeldTime, held_time

# What devices do while they are held. `useful`: steps that count, and evaluations. `stall`: waiting for data. `lost`:
# steps made again. `checkpoint`: waiting for one. `restart`: starting, building, and recovering from faults. `idle`:
# between steps, where nothing else is on record: code of the user's, a hang until it is seen, a step that was cut off.
KINDS = ("useful", "stall", "lost", "checkpoint", "restart", "idle")


@dataclass(frozen=True)
class SpentTime:
    """A stretch of held time, and its seconds by kind, which add up to it."""

    held: HeldTime
    seconds: dict[str, float]


def held_devices(records: Records) -> list[HeldTime]:
    """Return when the run held how many devices, in order and without an overlap."""
    return held_time(records.starts, records.spans, records.of(RecoveryRecord))


def stretches(records: Records) -> list[SpentTime]:
    """Return the run's held time with what the devices did in it, cut at midnights of the local clock.

    Kinds add up to each stretch.
    """
    days = [list(_by_day(each)) for each in held_devices(records)]
    held = [part for parts in days for part in parts]
    if not held:
        return []
    found = [dict.fromkeys(KINDS, 0.0) for _ in held]
    ends = np.array([each.ended for each in held])
    midnights = [part.began for parts in days for part in parts[1:]]

    def add(moments: np.ndarray, seconds: np.ndarray, kind: str, lengths: np.ndarray | None = None) -> None:
        """Count what ended at these moments; `lengths` are those of what it was a part of, if not its own."""
        lengths = seconds if lengths is None else lengths
        known = np.isfinite(moments) & np.isfinite(seconds)
        moments, seconds, lengths = moments[known], seconds[known], lengths[known]
        for cut in midnights:  # what passes one counts for both sides
            over = (moments > cut) & (moments - lengths < cut)
            after = (moments[over] - cut) / lengths[over]
            moments = np.append(moments, np.full(len(after), cut))
            lengths = np.append(lengths, lengths[over] * (1 - after))
            seconds = np.append(seconds, seconds[over] * (1 - after))
            seconds[: len(over)][over] *= after
            lengths[: len(over)][over] *= after
        places = np.minimum(np.searchsorted(ends, moments), len(held) - 1)
        for place, total in enumerate(np.bincount(places, seconds, len(held)).tolist()):
            found[place][kind] += total

    steps, lost = records.steps, lost_mask(records)
    moments, total = steps.column("time"), np.nan_to_num(steps.column("total"))
    waited = np.minimum(np.nan_to_num(steps.column("data")), total)
    add(moments[~lost], (total - waited)[~lost], "useful", total[~lost])
    add(moments[~lost], waited[~lost], "stall", total[~lost])
    add(moments[lost], total[lost], "lost")
    evaluations = [(number(record.time), number(record.seconds)) for record in records.of(EvaluationRecord)]
    saves = [(number(record.time), number(record.cost_seconds)) for record in records.of(CheckpointRecord)]
    beside = []
    for kind, pairs in (("useful", evaluations), ("checkpoint", saves)):
        own = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
        add(own[:, 0], own[:, 1], kind)
        beside.append(own)
    free = unclaimed_starting(records, np.concatenate(beside), [(each.began, each.ended) for each in held])
    return [SpentTime(each, _whole(each.seconds, seconds, starting))
            for each, seconds, starting in zip(held, found, free, strict=True)]  # fmt: skip


def _by_day(held: HeldTime) -> Iterator[HeldTime]:
    """Yield held time cut at the midnights of the local clock that it passes."""
    began = held.began
    while began < held.ended:
        day = datetime.datetime.fromtimestamp(began).date() + datetime.timedelta(days=1)
        midnight = datetime.datetime.combine(day, datetime.time()).timestamp()
        yield dataclasses.replace(held, began=began, ended=min(midnight, held.ended))
        began = midnight


def _whole(seconds: float, kinds: dict[str, float], starting: float) -> dict[str, float]:
    """Return the kinds with what none of them claims: as much of it as is `starting` as restart, the rest as idle.

    Where they claim too much, they are taken in their proportion.
    """
    claimed = sum(kinds.values())
    if claimed > seconds:
        return {kind: value * seconds / claimed for kind, value in kinds.items()}
    restart = min(seconds - claimed, starting)
    return {**kinds, "restart": kinds["restart"] + restart, "idle": kinds["idle"] + seconds - claimed - restart}
