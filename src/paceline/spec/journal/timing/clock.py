"""One clock for the records of a run: the clock of a machine may be set while a run goes on, forward or back.

Who writes a journal notes such a move (`clock`); who reads it takes the moves away, so that the time between two
records is the time that has passed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping

from paceline.spec.journal.kinds import ClockRecord, RunEnded, RunStarted, StepRecord
from paceline.spec.journal.record import Some, number
from paceline.spec.journal.record import moment as known_moment

LEAST_SECONDS = 1.0  # of a move that is noted: clocks that are kept right drift by less in days
BACK_SECONDS = 10.0  # from which on steps that come before each other are taken for a move that nobody has noted
OVERLAP_SECONDS = 2.0  # of two starts: a run has one at a time, so that more of it is a clock's doing
APART_SECONDS = 1e-3  # between two starts that are brought in order: more than a moment is rounded by
ReadsSeconds = Callable[[], float]


def passed_seconds() -> float:
    """Return a count of seconds that nobody sets; those in which the machine was suspended count where it can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class MovedClock:
    """Notices that this machine's clock was set, since it was last asked."""

    def __init__(self, clock: ReadsSeconds = lambda: time.time(), passed: ReadsSeconds = passed_seconds) -> None:
        self._clock, self._passed = clock, passed
        self._apart = clock() - passed()

    def moved(self) -> float:
        """Return by how many seconds the clock was set forward (back where negative); 0 where it was not."""
        apart = self._clock() - self._passed()
        by = apart - self._apart
        if abs(by) < LEAST_SECONDS:
            return 0.0
        self._apart = apart
        return by


class RunMoments:
    """The moments of a run's records, in order, by the clock as it was when each start began.

    `moved` has for each start by how much its clock was set since then: added to a moment, it is what the clock that
    holds now would have shown.
    """

    def __init__(self) -> None:
        self.moved: dict[int, float] = {}
        self._last_step: dict[int, float] = {}

    def of(self, attempt: int, line: Mapping[str, object]) -> float | None:
        """Return the moment of the next line of a start; None where it has none."""
        kind, moment = line.get("kind"), known_moment(line.get("time"))
        if kind == RunStarted.KIND:
            self._last_step.pop(attempt, None)
        if kind == ClockRecord.KIND:
            self.moved[attempt] = self.moved.get(attempt, 0.0) + (_finite(line.get("moved")) or 0.0)
        if moment is None:
            return None
        moment -= self.moved.get(attempt, 0.0)
        if kind == StepRecord.KIND:
            moment = self._step_at(attempt, moment, line)
        return moment

    def _step_at(self, attempt: int, moment: float, line: Mapping[str, object]) -> float:
        """Return when a step was made. One long before the step that it follows tells that the clock was set back."""
        last = self._last_step.get(attempt, -math.inf)
        if moment < last - BACK_SECONDS:
            seconds = line.get("seconds")
            after = last + ((_finite(seconds.get("total")) if isinstance(seconds, Mapping) else None) or 0.0)
            if known_moment(after) is not None:
                self.moved[attempt] = self.moved.get(attempt, 0.0) + moment - after
                moment = after
        self._last_step[attempt] = moment
        return moment


def shifts_of(
    starts: Iterable[RunStarted], spans: Mapping[int, tuple[float, float]], moved: Mapping[int, float]
) -> dict[int, float]:
    """Return by how much the moments of each start are to be shifted so that the clock that holds now tells them.

    A start that ends after the next one has begun ran by a clock that was set back between them: a run has one
    start at a time.
    """
    begun = {each.attempt or 1: each.began for each in starts if each.began is not None}
    shifts: dict[int, float] = {}
    next_began = math.inf
    for attempt in sorted(spans, reverse=True):
        first, last = spans[attempt]
        shift = moved.get(attempt, 0.0)
        if last + shift > next_began + OVERLAP_SECONDS:
            shift = next_began - APART_SECONDS - last
        shifts[attempt] = shift
        next_began = min(first, begun.get(attempt, first)) + shift
    return shifts


def at_moment(line: Mapping[str, object], moment: float) -> dict[str, object]:
    """Return a line as one that was written at another moment of the clock, with what it tells of a later one."""
    later, written = _finite(line.get("goes_on")), _finite(line.get("time"))
    if later is None or written is None:
        return {**line, "time": moment}
    return {**line, "time": moment, "goes_on": later + moment - written}


def shifted(record: Some, seconds: float) -> Some:
    """Return a record as one that was made so many seconds later."""
    if not seconds or record.time is None:
        return record
    later = dataclasses.replace(record, time=record.time + seconds)
    if isinstance(later, RunStarted) and later.began is not None:
        later = dataclasses.replace(later, began=later.began + seconds)
    if isinstance(later, RunEnded) and later.goes_on is not None:
        later = dataclasses.replace(later, goes_on=later.goes_on + seconds)
    return later


def _finite(value: object) -> float | None:
    known = number(value)
    return known if known is not None and math.isfinite(known) else None
