"""The writer of the journal: a run's append-only record, one JSON object per line.

`RUN/journal/0001.jsonl` holds the first start of a run, `0002.jsonl` the second, and so on; only rank 0 writes.
Every record has `schema`, `kind` and `time` (seconds since the epoch), and is declared in spec/journal. A record is one
write to a file opened for appending, so a killed process loses no record already written; a last line that was cut
short is ignored when reading. Where the disk takes no more, training goes on: records wait in memory (waiting_lines.py)
and are written in order when the disk takes them again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import weakref
from collections.abc import Callable
from inspect import ismethod
from pathlib import Path
from typing import Any

from paceline.errors import StorageError
from paceline.run.record.clock_notes import ClockNotes
from paceline.run.record.errand import Errand, is_remote
from paceline.run.record.waiting_lines import HeldLine, HeldLines
from paceline.spec.journal.kinds import RunStarted, StepRecord
from paceline.spec.journal.line import line_of
from paceline.spec.journal.reading import numbered
from paceline.spec.journal.record import Record
from paceline.spec.journal.timing.clock import MovedClock
from paceline.spec.run_files import journal_folder
from paceline.units import format_seconds

RETRY_SECONDS = 1.0  # between two tries to write what waits
HANGING_SECONDS = 10.0  # that training waits for a disk which does not answer
# What a descriptor answers with whose file system has gone: the same name must be opened again.
GONE = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EBADF, errno.ENOENT)
Fault = Callable[[str, str], None]
Decided = Callable[[str, Any, Any, str, Any], None]


class Journal:
    """The sink that keeps one start's records. Create it on rank 0 only.

    `fence` is called before each record and may raise. The file is the user's alone, and its group's to read with
    `group_read`. A disk that takes no record is no error until the journal is closed.
    """

    def __init__(self, run_dir: Path, fence: Callable[[], None] | None = None, group_read: bool = False) -> None:
        """Raises StorageError where the file cannot be made.

        On another machine's disk records are written in a thread, which is waited for no longer than HANGING_SECONDS.
        """
        self._fence, self._mode = fence, 0o640 if group_read else 0o600
        self._held, self._first = HeldLines(), b""
        self._since: float | None = None  # since when nothing can be written
        self._tried = 0.0
        self._most_held = 0
        self._clock = ClockNotes(MovedClock())
        self._fault: Callable[[], Fault | None] = lambda: None
        self._decided: Callable[[], Decided | None] = lambda: None
        self.folder = journal_folder(run_dir)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.attempt = 1 + max((number for number, _ in numbered(self.folder)), default=0)
            self.path = self.folder / f"{self.attempt:04d}.jsonl"
            self._file = self._opened(os.O_EXCL)
            self._errand = Errand(HANGING_SECONDS) if is_remote(self.folder) else None
        except OSError as error:
            raise StorageError(
                f"cannot write the journal in {self.folder}", str(error), "free space or choose another run.dir"
            ) from error

    def tell_by(self, fault: Fault, decided: Decided) -> None:
        """Have what becomes of the journal told: `fault(what, because)` when the disk takes no more, and then the rest.

        Both may write to this journal. Methods are not kept alive: their object may own it, and the lock of the run.
        """
        self._fault = weakref.WeakMethod(fault) if ismethod(fault) else lambda: fault
        self._decided = weakref.WeakMethod(decided) if ismethod(decided) else lambda: decided

    def write(self, record: Record) -> None:
        """Append one record, or hold it until the disk takes it. Raises what the fence does."""
        if self._errand is None:
            self._look_for_others()
        for each in self._clock.with_note(record):
            line = line_of(each)
            if isinstance(each, RunStarted):
                self._first = line
            self._held.add(HeldLine(each.KIND, line, each.step if isinstance(each, StepRecord) else None))
        self._most_held = max(self._most_held, len(self._held))
        if self._since is not None and time.monotonic() - self._tried < RETRY_SECONDS:
            return
        error = self._try_to_write()
        if error is not None and self._since is None:
            self._since = self._tried
            self._tell(error)
        elif error is None and self._since is not None:
            self._tell_return()

    def close(self) -> None:
        """Flush to disk and close. Raises StorageError where records are lost with it."""
        error = self._errand.send(self._finish) if self._errand else self._finish()
        if error is not None:
            raise StorageError(
                f"{len(self._held)} records of the journal {self.path} are lost", str(error),
                "free space and start again",
            ) from error  # fmt: skip

    # ---- a disk that takes no more ---------------------------------------------------------------------------------

    def _look_for_others(self) -> None:
        if self._fence is not None:
            self._fence()

    def _try_to_write(self) -> OSError | None:
        """Write what waits; return why not all of it could be."""
        self._tried = time.monotonic()
        return self._errand.send(self._fenced) if self._errand else self._write_held()

    def _fenced(self) -> OSError | None:
        self._look_for_others()  # which reads a file of the same disk
        return self._write_held()

    def _finish(self) -> OSError | None:
        try:
            if len(self._held):
                self._look_for_others()
            error = self._write_held()
            if error is None:
                os.fsync(self._file)
        except OSError as failure:
            error = failure
        finally:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1  # the number may soon be another file's
        return error

    def _write_held(self) -> OSError | None:
        """Write what waits; return why not all of it could be."""
        try:
            if not os.fstat(self._file).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was deleted", str(self.path))
            self._held.write_to(self._file)
        except OSError as error:
            if error.errno not in GONE:
                return error
        else:
            return None
        try:
            self._open_again()
            self._held.write_to(self._file)
        except OSError as error:
            return error
        return None

    def _open_again(self) -> None:
        """Open the file by its name, and begin it anew where another disk is there than before. Raises OSError."""
        self.folder.mkdir(exist_ok=True)
        file, before = self._opened(0), self._file
        self._file = file
        with contextlib.suppress(OSError):  # what is gone cannot be closed well
            os.close(before)
        self._held.begin_anew(b"\n" if os.fstat(file).st_size else self._first)

    def _opened(self, how: int) -> int:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | how, 0o600)
        if self._mode != 0o600:
            os.fchmod(file, self._mode)
        return file

    def _tell(self, error: OSError) -> None:
        if (fault := self._fault()) is not None:
            because = f"{error}; its records are held in memory until it can be written again"
            fault(f"the journal {self.path} cannot be written", because)

    def _tell_return(self) -> None:
        """Tell that all is written that waited, and what was left out meanwhile."""
        assert self._since is not None
        seconds, left_out, steps = time.monotonic() - self._since, self._held.left_out, self._held.steps_left_out
        held, self._since, self._most_held = self._most_held, None, 0
        self._held.forget_gaps()
        if (decided := self._decided()) is None:
            return
        gap = f"; {sum(left_out.values())} more are left out" if left_out else ""
        gap += f", of steps {steps[0]} to {steps[1]}" if steps else ""
        because = f"it could not be written for {format_seconds(seconds)}, and up to {held} records waited{gap}"
        evidence = {"seconds": seconds, "held": held, "left_out": left_out, "steps_left_out": steps}
        after = "written with a gap" if left_out else "written"
        decided("journal", "held in memory", after, because, evidence)
