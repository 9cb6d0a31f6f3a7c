"""One clock for the records of a run: the clock of a machine may be set while a run goes on, forward or back.

Who writes a journal notes such a move (`clock`); who reads it takes the moves away, so that the time between two
records is the time that has passed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from paceline.spec.journal.kinds import ClockRecord, RunEnded, RunStarted, StepRecord
from paceline.spec.journal.record import Some, number
from paceline.spec.journal.record import moment as known_moment
from paceline.system.this_machine import BOOT

LEAST_SECONDS = 1.0  # of a move that is noted: clocks that are kept right drift by less in days
BACK_SECONDS = 10.0  # from which on steps that come before each other are taken for a move that nobody has noted
OVERLAP_SECONDS = 2.0  # of two starts: a run has one at a time, so that more of it is a clock's doing
TIMES = Path("/proc/self/ns/time")
APART_SECONDS = 1e-3  # between two starts that are brought in order: more than a moment is rounded by
BY_THE_CLOCK = ("goes_on", "began", "clock_apart")  # further fields of lines that are told by the clock of the line
TRIES = 10  # to read two clocks while the process stands still nowhere between them
AT_ONCE_SECONDS = 0.1  # that two readings, one after the other, take at most
ReadsSeconds = Callable[[], float]


def passed_seconds() -> float:
    """Return a count of seconds that nobody sets; those in which the machine was suspended count where it can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def passed_here(moments: Mapping[str, float], clock: Mapping[str, Any]) -> dict[str, float]:
    """Return moments in seconds that nobody sets as this machine counts them; `clock` is of whoever noted them.

    Another machine's, or those of another boot, are told by the clock of either.
    """
    here = clock_here()
    is_other = bool(clock) and (not here["boot"] or clock["boot"] != here["boot"])
    by = float(clock["apart"]) - here["apart"] if is_other else 0.0
    return {name: moment + by for name, moment in moments.items()}


def boot_here() -> str:
    """Return which start of which machine this is, as its kernel names it: its processes count the same seconds.

    Those of a namespace of time (time_namespaces(7)) count others. Empty where that is not told.
    """
    try:
        return f"{BOOT.read_text().strip()}.{TIMES.stat().st_ino}" if hasattr(time, "CLOCK_BOOTTIME") else ""
    except OSError:
        return ""


def _apart(clock: ReadsSeconds = lambda: time.time(), passed: ReadsSeconds = passed_seconds) -> float:
    """Return the clock less the seconds that nobody sets; read again where the process stood still between the two."""
    for _ in range(TRIES):
        before, shown, after = passed(), clock(), passed()
        if after - before < AT_ONCE_SECONDS:
            break
    return shown - (before + after) / 2


class MachineClock(TypedDict):
    """How a machine's clock stands to the seconds that nobody sets: in which boot, and how many seconds apart."""

    boot: str
    apart: float


def clock_here() -> MachineClock:
    """Return how this machine's clock stands to the seconds that nobody sets."""
    return {"boot": boot_here(), "apart": _apart()}


def on_clock(passed: float, clock: MachineClock | None = None) -> float:
    """Return what this machine's clock would have shown when so many seconds had passed.

    `clock` is how the clock stood to these seconds at some moment; without it, how the clock stands now.
    """
    return (_apart() if clock is None else clock["apart"]) + passed


class MovedClock:
    """Notices that this machine's clock was set, since it was last asked."""

    def __init__(
        self,
        clock: ReadsSeconds = lambda: time.time(),
        passed: ReadsSeconds = passed_seconds,
    ) -> None:
        self._clock, self.passed = clock, passed
        self.apart = _apart(clock, passed)  # when it was last asked

    def moved(self) -> float:
        """Return by how many seconds the clock was set forward (back where negative); 0 where it was not."""
        apart = _apart(self._clock, self.passed)
        by = apart - self.apart
        if abs(by) < LEAST_SECONDS:
            return 0.0
        self.apart = apart
        return by


def moved_since(lines: Iterable[Mapping[str, object]], here: MachineClock) -> float:
    """Return by how much this machine's clock was set since the last line of a start, as far as no line notes it.

    `here` is how the clock stands. It is 0 where the start was of another machine or boot.
    """
    before, boot = 0.0, ""
    for line in lines:
        if line.get("kind") == RunStarted.KIND:
            before, boot = _finite(line.get("clock_apart")) or 0.0, str(line.get("boot") or "")
        elif line.get("kind") == ClockRecord.KIND:
            before += _finite(line.get("moved")) or 0.0
    by = here["apart"] - before if boot and boot == here["boot"] else 0.0
    return by if abs(by) >= LEAST_SECONDS else 0.0


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

    What nobody has noted is how the clock was set between two starts. Those of one boot of a machine tell it by how its
    clock stood at each. Of others a start that ends after the next one has begun ran by a clock that was set back
    between them: a run has one start at a time.
    """
    known = {each.attempt or 1: each for each in starts}
    shifts: dict[int, float] = {}
    next_began, later = math.inf, 0.0
    following: tuple[RunStarted | None, float] = None, 0.0
    for attempt in sorted(spans, reverse=True):
        first, last = spans[attempt]
        start, own = known.get(attempt), moved.get(attempt, 0.0)
        between = _set_between(start, following[0], own)
        shift = own + (later if between is None else following[1] + between)
        if last + shift > next_began + OVERLAP_SECONDS:
            shift = next_began - APART_SECONDS - last
        shifts[attempt] = later = shift
        if start is not None:
            following = start, shift
            next_began = min(first, first if start.began is None else start.began) + shift
    return _with_unknown(shifts, known, spans)


def _with_unknown(
    shifts: Mapping[int, float], known: Mapping[int, RunStarted], spans: Mapping[int, tuple[float, float]]
) -> dict[int, float]:
    """Return shifts where starts of which there is no first record, and so no clock, come after those before them."""
    placed, ended = dict(shifts), -math.inf
    for attempt, (first, last) in sorted(spans.items()):
        if attempt not in known and first + placed[attempt] < ended - OVERLAP_SECONDS:
            placed[attempt] = ended + APART_SECONDS - first
        ended = last + placed[attempt]
    return placed


def _set_between(start: RunStarted | None, following: RunStarted | None, noted: float) -> float | None:
    """Return by how much the clock was set between the last record of a start and a later one; None if unknown.

    `noted` is how much it was set in the first one's time, as its records tell.
    """
    if start is None or following is None or not start.boot or start.boot != following.boot:
        return None
    before, now = _finite(start.clock_apart), _finite(following.clock_apart)
    if before is None or now is None:
        return None
    by = now - before - noted
    return by if abs(by) >= LEAST_SECONDS else 0.0


def at_moment(line: Mapping[str, object], moment: float) -> dict[str, object]:
    """Return a line as one that was written at another moment of the clock, with all that it tells by that clock."""
    written = _finite(line.get("time"))
    told = {name: _finite(line[name]) for name in BY_THE_CLOCK if name in line} if written is not None else {}
    by = moment - (written or 0.0)
    return {**line, "time": moment, **{name: value + by for name, value in told.items() if value is not None}}


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


def told_by(record: Some, seconds: float) -> Some:
    """Return a record as a clock tells it that is set forward by so many seconds."""
    later = shifted(record, seconds)
    if isinstance(later, RunStarted) and later.clock_apart is not None:
        later = dataclasses.replace(later, clock_apart=later.clock_apart + seconds)
    return later


def _finite(value: object) -> float | None:
    known = number(value)
    return known if known is not None and math.isfinite(known) else None
