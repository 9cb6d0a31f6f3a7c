"""The writer of the journal: a run's append-only record, one JSON object per line.

`RUN/journal/0001.jsonl` holds the first start of a run, `0002.jsonl` the second, and so on; only rank 0 writes.
Every record has `schema`, `kind` and `time` (seconds since the epoch), and is declared in spec/journal. A record is one
write to a file opened for appending, so a killed process loses no record already written; a last line that was cut
short is ignored when reading.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import StorageError
from paceline.spec.journal.kinds import FaultRecord, RunEnded, StepRecord
from paceline.spec.journal.reading import numbered, read_records, starts_of
from paceline.spec.journal.record import Record, plain
from paceline.spec.journal.redact import Redactor


def _plain(value: Any) -> Any:
    """Return the value with numbers that JSON lacks (NaN, infinities) spelt as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _line(record: Record) -> bytes:
    fields = plain(record)
    line = (json.dumps(fields, separators=(",", ":"), default=str, allow_nan=True) + "\n").encode()
    if b"NaN" in line or b"Infinity" in line:
        line = (json.dumps(_plain(fields), separators=(",", ":"), default=str) + "\n").encode()
    return line


class Journal:
    """The sink that keeps one start's records. Create it on rank 0 only.

    `fence` is called before each record and may raise. The file is the user's alone, and its group's to read with
    `group_read`.
    """

    def __init__(self, run_dir: Path, fence: Callable[[], None] | None = None, group_read: bool = False) -> None:
        self._fence = fence
        self.folder = run_dir / "journal"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.attempt = 1 + max((number for number, _ in numbered(self.folder)), default=0)
            self.path = self.folder / f"{self.attempt:04d}.jsonl"
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            if group_read:
                os.fchmod(self._file, 0o640)
        except OSError as error:
            raise StorageError(
                f"cannot write the journal in {self.folder}", str(error), "free space or choose another run.dir"
            ) from error

    def write(self, record: Record) -> None:
        """Append one record. Raises StorageError where it cannot be written whole, or the fence refuses."""
        if self._fence is not None:
            self._fence()
        line = _line(record)
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise StorageError(f"cannot append to {self.path}", str(error), "free space and start again") from error
        if written != len(line):
            raise StorageError(f"cannot append to {self.path}", "the disk is full", "free space and start again")

    def close(self) -> None:
        """Flush to disk and close."""
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1  # the number may soon be another file's


def mark_end(run_dir: Path, exit_code: int, error: dict[str, Any], redactor: Redactor | None = None) -> None:
    """Append a fault and an end to the newest start if it has none: its writer was killed before it could.

    Only for a supervisor whose processes have all ended.
    """
    error = (redactor or Redactor()).data(error)
    newest = _unended(run_dir)
    if newest is not None:
        step = max((record.step or 0 for record in read_records(run_dir) if isinstance(record, StepRecord)), default=0)
        ended = RunEnded(status="failed", exit_code=exit_code, error=error, step=step)
        _append(newest, [_fault(error), ended])


def mark_fault(run_dir: Path, error: dict[str, Any], redactor: Redactor | None = None) -> None:
    """Append a fault to the newest start, which the run survives. For whom `mark_end` is for."""
    newest = _unended(run_dir)
    if newest is not None:
        _append(newest, [_fault((redactor or Redactor()).data(error))])


def _unended(run_dir: Path) -> Path | None:
    """Return the file of the newest start where that has no end on record."""
    starts = starts_of(run_dir)
    newest = starts[-1][1] if starts else None
    return None if newest is None or b'"kind":"run_ended"' in newest.read_bytes()[-65536:] else newest


def _fault(error: dict[str, Any]) -> FaultRecord:
    what, because = str(error.get("what", "")), str(error.get("because", ""))
    return FaultRecord(what, because, error.get("rank"), evidence=error.get("evidence"))


def _append(path: Path, records: Sequence[Record]) -> None:
    with path.open("ab") as file:
        if path.read_bytes()[-1:] not in (b"\n", b""):
            file.write(b"\n")
        file.write(b"".join(map(_line, records)))
