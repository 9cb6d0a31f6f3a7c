"""Letting go of a file's lock."""

from __future__ import annotations

import contextlib
import fcntl
from typing import IO, Any


def unlock(stream: IO[Any]) -> None:
    """Let go of the lock of an opened file, whoever else has it open.

    To close it is not enough: a process that was forked while the lock was held has the same file open, and would hold
    the lock for as long as it lives.
    """
    with contextlib.suppress(OSError):  # of a file system without locks
        fcntl.flock(stream, fcntl.LOCK_UN)
