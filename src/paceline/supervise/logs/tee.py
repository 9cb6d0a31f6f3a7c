"""The log of a rank that no supervisor of ours has started: what Python prints in this process is kept as well.

Output of libraries that write past Python is printed, and is not in the log.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from paceline.spec.journal.redact import Redactor
from paceline.spec.run import RunSpec
from paceline.supervise.logs.files import ERR, OUT, RankLog
from paceline.supervise.logs.rank import LOGS_VARIABLE


class TeeStream:
    """A text stream that hands what is written on, and keeps it in a log. Everything else is the stream's."""

    def __init__(self, stream: TextIO, log: RankLog, name: str) -> None:
        self._stream, self._log, self._name = stream, log, name

    def write(self, text: str) -> int:
        """Write text to the stream, then to the log."""
        written = self._stream.write(text)
        self._log.write(self._name, text.encode(errors="replace"))
        return written

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextlib.contextmanager
def kept_here(run_dir: Path, run: RunSpec, rank: int = 0) -> Iterator[None]:
    """Keep what this process prints in its rank's log, unless a supervisor does."""
    if not run.observe.logs or LOGS_VARIABLE in os.environ:
        yield
        return
    log = RankLog(
        run_dir, rank, run.observe.log_limit, run.observe.log_files, Redactor(run.redact),
        0o640 if run.group_read else 0o600,
    )  # fmt: skip
    before = sys.stdout, sys.stderr
    tees: Any = (TeeStream(sys.stdout, log, OUT), TeeStream(sys.stderr, log, ERR))
    sys.stdout, sys.stderr = tees
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == tees:  # who has put another in their place has it
            sys.stdout, sys.stderr = before
        log.close()
