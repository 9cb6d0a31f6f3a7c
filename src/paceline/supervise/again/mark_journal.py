"""Mark a run's journal with what its writer cannot tell: a fault that killed the writer, and the end of a start.

A first rank that lives records a fault when it reads the supervisor's answer. Until then the supervisor alone knows of
it, and tells it where that rank is lost before (`HandedFaults`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import Requeue
from paceline.spec.journal.kinds import ClockRecord, FaultRecord, RunEnded, RunStarted, StepRecord
from paceline.spec.journal.line import line_of
from paceline.spec.journal.reading import parsed_line, read_records, records_of_kind, starts_of
from paceline.spec.journal.record import Record, read
from paceline.spec.journal.redact import Redactor
from paceline.spec.journal.timing.clock import clock_here, moved_since, on_clock, passed_seconds

KIND = f'"kind":"{FaultRecord.KIND}"'.encode()
READ_BYTES = 2**22  # of a start: what is handed on is recorded at once, before any step
NAMES = ("what", "because", "rank")  # by which a record is known to be of a fault


def mark_end(run_dir: Path, exit_code: int, error: dict[str, object], redactor: Redactor | None = None) -> None:
    """Append a fault and an end to the newest start if it has none: its writer was killed before it could.

    One with the exit code of Requeue is to be started again. Only for a supervisor whose processes have all ended.
    """
    error = (redactor or Redactor()).data(error)
    newest = _unended(run_dir)
    if newest is not None:
        step = max((record.step or 0 for record in read_records(run_dir) if isinstance(record, StepRecord)), default=0)
        goes_on = exit_code == Requeue.exit_code
        ended = RunEnded("requeue", exit_code, None, step) if goes_on else RunEnded("failed", exit_code, error, step)
        _append(newest, [_fault(error), ended])


def mark_fault(run_dir: Path, error: dict[str, object], redactor: Redactor | None = None) -> None:
    """Append a fault to the newest start, which the run survives. For whom `mark_end` is for."""
    newest = _unended(run_dir)
    if newest is not None:
        _append(newest, [_fault((redactor or Redactor()).data(error))])


def _unended(run_dir: Path) -> Path | None:
    """Return the file of the newest start where that has no end on record."""
    starts = starts_of(run_dir)
    newest = starts[-1][1] if starts else None
    return None if newest is None or b'"kind":"run_ended"' in newest.read_bytes()[-65536:] else newest


def _fault(error: Mapping[str, object]) -> FaultRecord:
    return read(FaultRecord, error)


def _append(path: Path, records: Sequence[Record]) -> None:
    """Append records, after a note of how the clock was set since the last line: who would note it is gone."""
    lines = list(records_of_kind(path, RunStarted.KIND, ClockRecord.KIND))
    clock = clock_here()  # one look for all: the clock may be set between two
    moved, shown = moved_since(lines, clock), on_clock(passed_seconds(), clock)
    noted = [*([ClockRecord(moved)] if moved else []), *records]
    records = [dataclasses.replace(each, time=shown) for each in noted]
    with path.open("ab") as file:
        if path.read_bytes()[-1:] not in (b"\n", b""):
            file.write(b"\n")
        file.write(b"".join(map(line_of, records)))


@dataclass(frozen=True)
class HandedFault:
    """A fault that the first rank is to record, and where its journal ended before."""

    error: Mapping[str, object]
    start: int  # the number of the newest start by then; 0 where there was none
    length: int  # bytes of that start's file


class HandedFaults:
    """The faults of one run that are handed on."""

    def __init__(self, run_dir: Path, redactor: Redactor | None) -> None:
        self._run_dir, self._redactor = run_dir, redactor or Redactor()
        self._open: list[HandedFault] = []

    def hand(self, error: Mapping[str, object]) -> None:
        """Note that the first rank is told of a fault, as the answer to it will."""
        newest = starts_of(self._run_dir)[-1:]
        at = (newest[0][0], _length(newest[0][1])) if newest else (0, 0)
        self._open.append(HandedFault(dict(error), *at))

    def settle(self, is_lost: bool) -> None:
        """Put on record what the first rank has not, where it is lost; who lives has, or will when it begins a journal.

        Raises OSError where the journal cannot be read or written: then all is open still.
        """
        claimed = set[tuple[int, int]]()  # records, each of which tells one fault of several that are alike
        self._open = [each for each in self._open if not self._is_told(each, claimed)]
        while is_lost and self._open and starts_of(self._run_dir):
            mark_fault(self._run_dir, dict(self._open[0].error), self._redactor)
            del self._open[0]

    def _is_told(self, fault: HandedFault, claimed: set[tuple[int, int]]) -> bool:
        """Return whether a record of it was written since it was handed on, which is claimed then."""
        told = self._redactor.data(dict(fault.error))
        for number, path in starts_of(self._run_dir):
            if number < fault.start:
                continue
            at = fault.length if number == fault.start else 0
            with path.open("rb") as file:
                file.seek(at)
                lines = file.read(READ_BYTES).splitlines(keepends=True)
            for line in lines:
                record = (parsed_line(line) or {}) if KIND in line else {}
                if record and all(record.get(name) == told.get(name) for name in NAMES) and (number, at) not in claimed:
                    claimed.add((number, at))
                    return True
                at += len(line)
        return False


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
