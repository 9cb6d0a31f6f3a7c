"""Mark a run's journal with what its writer cannot tell: a fault that killed the writer, and the end of a start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import Requeue
from paceline.spec.journal.kinds import ClockRecord, FaultRecord, RunEnded, RunStarted, StepRecord
from paceline.spec.journal.line import line_of
from paceline.spec.journal.reading import TAIL_BYTES, parsed_line, read_records, records_of_kind, starts_of
from paceline.spec.journal.record import Record, read
from paceline.spec.journal.redact import Redactor
from paceline.spec.journal.timing.clock import clock_here, moved_since, on_clock, passed_seconds

OF_FAULT = f'"kind":"{FaultRecord.KIND}"'.encode()
JournalEnd = tuple[int, int]  # the number of the newest start, 0 where there is none, and how many bytes its file has


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


def end_of_journal(run_dir: Path) -> JournalEnd:
    """Return where the journal of a run ends now."""
    starts = starts_of(run_dir)
    return (starts[-1][0], starts[-1][1].stat().st_size) if starts else (0, 0)


def is_marked(run_dir: Path, error: Mapping[str, object], since: JournalEnd, redactor: Redactor | None = None) -> bool:
    """Return whether a fault is on record, as one of the first records after `since`."""
    error, (first, length) = (redactor or Redactor()).data(dict(error)), since
    wanted = [error.get(name) for name in ("what", "because")]
    for number, path in starts_of(run_dir):
        if number >= first:
            with path.open("rb") as file:
                file.seek(length if number == first else 0)
                lines = file.read(TAIL_BYTES).splitlines()
            faults = [parsed_line(line) or {} for line in lines if OF_FAULT in line]
            if any([fault.get(name) for name in ("what", "because")] == wanted for fault in faults):
                return True
    return False


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
