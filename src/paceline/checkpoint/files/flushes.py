"""Files that are written and not yet safe: the disk takes all of them together, at the end of a block."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import IO


class Flushes:
    """Open files that are flushed one after the other where a `with` block ends well, and closed in any case.

    The first flush has a file system with a journal commit what all of them need, so that the others cost next to
    nothing; a flush after each file would make it commit as often. They stay open until then, since the kernel tells of
    a failed write by the descriptor through which it was made.
    """

    def __init__(self) -> None:
        self._files: list[IO[bytes]] = []
        self._opened = contextlib.ExitStack()

    def add(self, file: IO[bytes]) -> None:
        """Take over a file that is written: it is flushed and closed here."""
        self._files.append(self._opened.enter_context(file))

    def __enter__(self) -> Flushes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._opened:
            for file in self._files if error is None else ():
                os.fsync(file.fileno())
