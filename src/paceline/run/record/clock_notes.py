"""Notes of how a machine's clock was set while records were made and written, so that each is told by a known clock.

A record has its moment when it is made and is written a little later, and the clock may be set in between, more than
once. Where the journal has a note of such a move, all before the note is told by the clock as it was, and all after it
by the clock as it is.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from paceline.spec.journal.kinds import ClockRecord, RunStarted
from paceline.spec.journal.record import Record
from paceline.spec.journal.timing.clock import LEAST_SECONDS, MovedClock, clock_here, on_clock, passed_seconds, told_by

LATE_SECONDS = 10.0  # that a record is written after it was made, at most, as far as clocks are told apart by it
MOST = 16  # settings of the clock that are remembered


class ClockNotes:
    """Gives records that are about to be written, each with a note where the clock was set since the one before."""

    def __init__(self, clock: MovedClock) -> None:
        self._clock = clock
        self._stood = deque([clock.apart], MOST)  # how the clock was set, the newest last

    def with_note(self, record: Record) -> list[Record]:
        """Return a record, by the clock that holds where it stands, and the note that is due, in their order."""
        moved = self._clock.moved()
        if not moved:
            return [self._by_newest(record)]
        self._stood.append(self._clock.apart)
        # Not the clock as it shows by now: who knows how often it is set.
        note = ClockRecord(moved, time=self._clock.apart + self._clock.passed())
        return [record, note] if self._made_by(record) == len(self._stood) - 2 else [note, self._by_newest(record)]

    def _by_newest(self, record: Record) -> Record:
        """Return a record as the clock tells it that holds now; as one of now where no known clock can have made it.

        An old record is left as it is where no note was due yet: a clock that was set there and back looks the same.
        """
        newest, made_by = len(self._stood) - 1, self._made_by(record)
        if made_by is not None:
            by = self._stood[newest] - self._stood[made_by]
        else:
            age = self._ages(record)[newest]
            by = age if newest or age < 0 else 0.0
        return told_by(record, by)

    def _made_by(self, record: Record) -> int | None:
        """Return by which setting a record was made, which is the one by which it is the newest; None by none."""
        ages = [(age, -at) for at, age in enumerate(self._ages(record)) if -LEAST_SECONDS <= age < LATE_SECONDS]
        return -min(ages)[1] if ages else None

    def _ages(self, record: Record) -> list[float]:
        """Return how long ago a record was made, by each of the settings."""
        passed = self._clock.passed()
        return [0.0 if record.time is None else passed + apart - record.time for apart in self._stood]


def begun_by_clock_here(started: RunStarted, began: float | None) -> RunStarted:
    """Return the record of a start as one of now, with how the clock stands; `began` is in `passed_seconds`.

    All that the record tells by the clock is of one look at the clock, which may be set between two.
    """
    clock = clock_here()
    boot, apart = (clock["boot"], clock["apart"]) if clock["boot"] else (None, None)
    since = None if began is None else on_clock(began, clock)
    made = on_clock(passed_seconds(), clock)
    return dataclasses.replace(started, time=made, began=since, boot=boot, clock_apart=apart)
