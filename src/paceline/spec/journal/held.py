"""When a run held how many devices, from its journal.

A run holds devices while one of its starts is at work: from its first record to its last, and while a fault is
recovered from. Between starts it holds none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.spec.journal.kinds import RecoveryRecord, RunStarted, parse
from paceline.spec.journal.reading import TAIL_BYTES, records_in, records_of_kind, starts_of

Span = tuple[float, float]  # seconds since the epoch


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


def held_time(
    starts: Sequence[RunStarted], spans: Mapping[int, Span], recoveries: Sequence[RecoveryRecord]
) -> list[HeldTime]:
    """Return the stretches in order and without an overlap, from the first and last moment of each start's records.

    While a fault is recovered from, the devices are those of the world before.
    """
    changes: list[tuple[float, int]] = []  # (moment, devices from there on)
    covered: list[Span] = []
    for start in starts:
        if (span := spans.get(start.attempt or 1)) is not None:
            covered.append(span)
            changes.append((span[0], start.world_size or 1))
    for recovery in recoveries:
        made, total, step = recovery.time, recovery.seconds.get("total"), recovery.seconds.get("step")
        if made is None or total is None:
            continue
        covered.append((made - total, made))
        if recovery.from_world:
            changes.append((made - total, recovery.from_world))
        if recovery.to_world:
            changes.append((made - (step or 0.0), recovery.to_world))
    changes.sort(key=lambda change: change[0])
    return [
        HeldTime(began, ended, _devices(changes, began), _start(starts, spans, began))
        for began, ended in _cut(_joined(covered), [moment for moment, _ in changes])
    ]


def held_in(run_dir: Path) -> list[HeldTime]:
    """Return the stretches of a run's directory, of whose journal the ends and few kinds are parsed."""
    starts: list[RunStarted] = []
    spans: dict[int, Span] = {}
    recoveries: list[RecoveryRecord] = []
    for number, path in starts_of(run_dir):
        moments: list[float] = []
        for kind, found in ((RunStarted, starts), (RecoveryRecord, recoveries)):
            for line in records_of_kind(path, kind.KIND):
                record = parse({"attempt": number, **line})
                found.append(record)  # type: ignore[arg-type]
                moments += [record.time] if record and record.time else []
        last = [line["time"] for line in records_in(path, TAIL_BYTES) if isinstance(line.get("time"), int | float)]
        moments += last
        if moments:
            spans[number] = (min(moments), max(moments))
    return held_time(starts, spans, recoveries)


def _joined(spans: list[Span]) -> list[Span]:
    """Return the spans in order, those that touch made one."""
    found: list[Span] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found


def _cut(spans: list[Span], moments: list[float]) -> Iterator[Span]:
    """Yield the parts of the spans between the moments."""
    for began, ended in spans:
        edges = sorted({began, ended, *(moment for moment in moments if began < moment < ended)})
        yield from itertools.pairwise(edges)


def _devices(changes: list[tuple[float, int]], moment: float) -> int:
    """Return the devices that the newest change up to a moment gives."""
    return next((devices for when, devices in reversed(changes) if when <= moment), changes[0][1])


def _start(starts: Sequence[RunStarted], spans: Mapping[int, Span], moment: float) -> RunStarted:
    """Return the newest start at a moment, or the first one."""
    begun = [start for start in starts if spans.get(start.attempt or 1, (math.inf, 0.0))[0] <= moment]
    return begun[-1] if begun else starts[0]
