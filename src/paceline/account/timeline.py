"""Device-seconds of a run: how many devices it held at each moment, and what they did.

A run holds devices while one of its starts is at work: from its first record to its last, and while a fault is
recovered from. Between starts it holds none. So devices times seconds, summed over the kinds, are exactly the devices
times the time in which they were held; what no record claims is starting.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.report.phases import lost_mask
from paceline.report.records import Records, number
from paceline.spec.journal.kinds import CheckpointRecord, EvaluationRecord, RecoveryRecord, RunStarted

# What devices do while they are held. `useful`: steps that count, and evaluations. `stall`: waiting for data. `lost`:
# steps made again. `checkpoint`: waiting for one. `restart`: starting, building, and recovering from faults.
KINDS = ("useful", "stall", "lost", "checkpoint", "restart")


@dataclass(frozen=True)
class HeldTime:
    """A stretch of time in which a run held as many devices all along; times are seconds since the epoch."""

    began: float
    ended: float
    devices: int
    start: RunStarted  # the start whose plan and prices hold

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.ended - self.began


@dataclass(frozen=True)
class SpentTime:
    """A stretch of held time, and its seconds by kind, which add up to it."""

    held: HeldTime
    seconds: dict[str, float]


def held_devices(records: Records) -> list[HeldTime]:
    """Return when the run held how many devices, in order and without an overlap."""
    changes: list[tuple[float, int]] = []  # (moment, devices from there on)
    covered: list[tuple[float, float]] = []
    for start in records.starts:
        span = records.spans.get(start.attempt or 1)
        if span is None:
            continue
        covered.append(span)
        changes.append((span[0], start.world_size or 1))
    for recovery in records.of(RecoveryRecord):
        made, total = number(recovery.time), number(recovery.seconds.get("total"))
        if made is None or total is None:
            continue
        covered.append((made - total, made))
        if recovery.from_world:
            changes.append((made - total, recovery.from_world))
        if recovery.to_world:
            changes.append((made - (number(recovery.seconds.get("step")) or 0.0), recovery.to_world))
    changes.sort(key=lambda change: change[0])
    return [
        HeldTime(began, ended, _devices(changes, began), _start(records, began))
        for began, ended in _cut(_joined(covered), [moment for moment, _ in changes])
    ]


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


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the spans in order, those that touch made one."""
    found: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found


def _cut(spans: list[tuple[float, float]], moments: list[float]) -> Iterator[tuple[float, float]]:
    """Yield the parts of the spans between the moments."""
    for began, ended in spans:
        edges = sorted({began, ended, *(moment for moment in moments if began < moment < ended)})
        yield from itertools.pairwise(edges)


def _devices(changes: list[tuple[float, int]], moment: float) -> int:
    """Return the devices that the newest change up to a moment gives."""
    return next((devices for when, devices in reversed(changes) if when <= moment), changes[0][1])


def _start(records: Records, moment: float) -> RunStarted:
    """Return the newest start at a moment, or the first one."""
    begun = [start for start in records.starts if records.spans.get(start.attempt or 1, (np.inf,))[0] <= moment]
    return begun[-1] if begun else records.starts[0]
