"""The file of one rank's log: printed lines, every line with its moment; a file that is full is set aside.

A line is `MOMENT out TEXT`, or `err`; the moment is UTC, to the millisecond. Of what is printed over with a carriage
return the last is kept. A disk that takes no more costs lines, and neither the run nor what is printed.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path

from paceline.spec.journal.redact import Redactor

FOLDER = "logs"
OUT, ERR = "out", "err"
LONGEST_BYTES = 1 << 16  # of a line: more is cut into several
AGAIN_SECONDS = 5.0  # after which a disk that took no line is tried again


def log_path(run_dir: Path, rank: int, older: int = 0) -> Path:
    """Return the file of a rank's log, or one that was set aside: 1 is the newest of those."""
    return run_dir / FOLDER / f"rank-{rank}.log{f'.{older}' if older else ''}"


class RankLog:
    """Writes one rank's log. One process has it."""

    def __init__(
        self, run_dir: Path, rank: int, limit_bytes: int, files: int, redactor: Redactor, mode: int = 0o600,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`files` is how many full ones are kept."""
        self._run_dir, self._rank, self._limit, self._files = run_dir, rank, limit_bytes, files
        self._redactor, self._mode, self._clock = redactor, mode, clock
        self._rest = {OUT: b"", ERR: b""}
        self._file, self._size, self._failed = -1, 0, -AGAIN_SECONDS
        self.left_out = 0  # lines that no disk took

    def write(self, stream: str, data: bytes) -> None:
        """Take what a stream has given; a line is written when it is whole."""
        *lines, rest = (self._rest[stream] + data).split(b"\n")
        while len(rest) > LONGEST_BYTES:
            lines.append(rest[:LONGEST_BYTES])
            rest = rest[LONGEST_BYTES:]
        _, over, tail = rest.rpartition(b"\r")
        self._rest[stream] = tail if over and tail else rest
        for line in lines:
            self._line(stream, line)

    def close(self) -> None:
        """Write what waits for the end of its line, and let go of the file."""
        for stream, rest in self._rest.items():
            if rest:
                self._line(stream, rest)
                self._rest[stream] = b""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _line(self, stream: str, line: bytes) -> None:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        text = self._redactor.text(shown) if shown else ""
        self._append(f"{moment_text(self._clock())} {stream} {text}\n".encode(errors="replace"))

    def _append(self, line: bytes) -> None:
        if time.monotonic() - self._failed < AGAIN_SECONDS:
            self.left_out += 1
            return
        try:
            if self._file < 0:
                self._open()
            elif self._size and self._size + len(line) > self._limit:
                self._set_aside()
            self._size += os.write(self._file, line)
        except OSError:  # full, or gone: the run goes on without these lines
            self._failed = time.monotonic()
            self.left_out += 1

    def _open(self) -> None:
        path = log_path(self._run_dir, self._rank)
        path.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, self._mode)
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            os.write(self._file, b"\n")

    def _set_aside(self) -> None:
        os.close(self._file)
        self._file = -1
        for older in range(self._files, 0, -1):
            source = log_path(self._run_dir, self._rank, older - 1)
            if source.exists():
                source.replace(log_path(self._run_dir, self._rank, older))
        if not self._files:
            log_path(self._run_dir, self._rank).unlink()
        self._open()


def moment_text(seconds: float) -> str:
    """Return a moment as lines of a log have it."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
