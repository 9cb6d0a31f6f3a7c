"""When a run held how many devices, from its journal.

A run holds devices while one of its starts is at work: from the moment at which its processes begin to build until its
last record, and while a fault is recovered from. Between starts it holds none.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from paceline.lock import live_since
from paceline.spec.journal.kinds import ClockRecord, RecoveryRecord, RunEnded, RunStarted
from paceline.spec.journal.reading import TAIL_BYTES, read_kind, records_in, starts_of
from paceline.spec.journal.record import read
from paceline.spec.journal.timing.clock import RunMoments, at_moment, shifted, shifts_of

Period = tuple[float, float]  # seconds since the epoch
Held = TypeVar("Held")


@dataclass(frozen=True)
class HeldTime:
    """A stretch of time in which a run held as many devices all along; times are seconds since the epoch."""

    began: float
    ended: float
    devices: int
    start: RunStarted  # the start whose plan and prices hold

    @property
    def seconds(self) -> float:
        """How long the stretch is."""
        return self.ended - self.began


def held_time(
    starts: Sequence[RunStarted], spans: Mapping[int, Period], recoveries: Sequence[RecoveryRecord]
) -> list[HeldTime]:
    """Return the stretches in order and without an overlap.

    `spans` are the moments of each start's first and last record. While a fault is recovered from, the devices are
    those of the world before.
    """
    changes: list[tuple[float, int]] = []  # (moment, devices from there on)
    covered: list[Period] = []
    begun: list[tuple[float, RunStarted]] = []
    for start in starts:
        if (span := spans.get(start.attempt or 1)) is not None:
            began = span[0] if start.began is None else min(span[0], start.began)
            covered.append((began, span[1]))
            changes.append((began, start.world_size or 1))
            begun.append((began, start))
    earliest = min((began for began, _ in begun), default=0.0)  # before it nothing can have been recovered from
    for recovery in recoveries:
        made, total, step = recovery.time, recovery.seconds.get("total"), recovery.seconds.get("step")
        if made is None or total is None or not math.isfinite(total):
            continue
        since = max(earliest, made - total)
        covered.append((since, made))
        if recovery.from_world:
            changes.append((since, recovery.from_world))
        if recovery.to_world:
            changes.append((made - (step or 0.0), recovery.to_world))
    if not begun:  # a fragment of a journal: nothing says what its devices cost
        return []
    changes.sort(key=lambda change: change[0])
    return [
        HeldTime(began, ended, _newest(changes, began), _newest(begun, began))
        for began, ended in _cut(joined(covered), [moment for moment, _ in changes])
    ]


def held_in(run_dir: Path) -> list[HeldTime]:
    """Return the stretches of a run's directory, of whose journal the ends and few kinds are parsed."""
    starts, recoveries = list(read_kind(run_dir, RunStarted)), list(read_kind(run_dir, RecoveryRecord))
    moved = {each.attempt or 1 for each in read_kind(run_dir, ClockRecord)}
    spans: dict[int, Period] = {}
    clock = RunMoments()
    for number, path in starts_of(run_dir):
        own = [each.time for each in (*starts, *recoveries) if each.attempt == number and each.time is not None]
        if number in moved:  # what was written before the clock was set is before all that was written after it
            lines = list(records_in(path))
            times = [(line, clock.of(number, line)) for line in lines]
            kept = {line["time"]: moment for line, moment in times if line["kind"] == RecoveryRecord.KIND}
            recoveries = [replace(each, time=kept.get(each.time, each.time)) if each.attempt == number else each
                          for each in recoveries]  # fmt: skip
            begun = [read(RunStarted, at_moment(line, moment)) for line, moment in times
                     if line["kind"] == RunStarted.KIND and moment is not None]  # fmt: skip
            starts = [begun[-1] if begun and each.attempt == number else each for each in starts]
            own = []
        else:
            times = [(line, line.get("time")) for line in records_in(path, TAIL_BYTES)]
        last = [moment for _, moment in times if isinstance(moment, int | float) and math.isfinite(moment)]
        if moments := [*own, *last]:
            spans[number] = (min(moments), max(moments))
    shifts = shifts_of(starts, spans, clock.moved)
    starts = [shifted(each, shifts.get(each.attempt or 1, 0.0)) for each in starts]
    recoveries = [shifted(each, shifts.get(each.attempt or 1, 0.0)) for each in recoveries]
    spans = {number: (first + shifts.get(number, 0.0), last + shifts.get(number, 0.0))
             for number, (first, last) in spans.items()}  # fmt: skip
    return held_time(starts, spans, recoveries)


def held_by_others(run_dir: Path, tags: Mapping[str, object], tag: str) -> list[HeldTime]:
    """Return the held time of the runs beside a run's directory whose newest start has the same value of a tag.

    Runs that cannot be read, or have begun nothing yet, have held none. A run that is at work on this machine holds
    its devices until now, though it may have written nothing for a while: it saves, or waits for a disk or a rank.
    """
    found: list[HeldTime] = []
    own = run_dir.resolve()
    for journal in sorted(own.parent.glob("*/journal")):
        if journal.parent == own:
            continue
        try:
            starts = list(read_kind(journal.parent, RunStarted))
            if starts and _tag(starts[-1], tag) == str(tags.get(tag)):
                found += _until_now(journal.parent, held_in(journal.parent), starts[-1])
        except OSError:  # it is removed meanwhile, or another user's
            continue
    return found


def _until_now(run_dir: Path, held: list[HeldTime], newest: RunStarted) -> list[HeldTime]:
    """Return the stretches, the last one until now where the process that made the newest start is at work."""
    since, now = live_since(run_dir), time.time()
    if not held or since is None or newest.time is None or newest.time < since or held[-1].ended > now:
        return held
    if any(each.attempt == newest.attempt for each in read_kind(run_dir, RunEnded)):
        return held
    return [*held[:-1], replace(held[-1], ended=now)]


def _tag(start: RunStarted, tag: str) -> str | None:
    run = start.spec.get("run")
    tags = run.get("tags") if isinstance(run, Mapping) else None
    return str(tags[tag]) if isinstance(tags, Mapping) and tag in tags else None


def joined(spans: list[Period]) -> list[Period]:
    """Return periods in order, those that touch made one."""
    found: list[Period] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found


def _cut(spans: list[Period], moments: list[float]) -> Iterator[Period]:
    """Yield the parts of the spans between the moments."""
    for began, ended in spans:
        edges = sorted({began, ended, *(moment for moment in moments if began < moment < ended)})
        yield from itertools.pairwise(edges)


def _newest(known: Sequence[tuple[float, Held]], moment: float) -> Held:
    """Return what holds at a moment, of what is known in order of time with the moments from which on it holds."""
    return next((what for when, what in reversed(known) if when <= moment), known[0][1])
