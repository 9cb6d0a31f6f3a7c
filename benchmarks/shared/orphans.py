"""Ends what tests, or a benchmark, have started once their own process is gone, however it ended: it takes cores.

`python orphans.py DESCRIPTOR MARK` waits for the process of the descriptor (a pidfd), then ends every process that has
the mark in its environment. It needs nothing but the interpreter, so that it costs a start of some milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import sys
import time
from pathlib import Path

NAME = "STARTED_BY_TESTS"
LOOKS, PAUSE_SECONDS = 20, 0.05  # what is being started at a look is found by a later one
QUIET_LOOKS = 3  # in a row that find nothing


def watch() -> str:
    """Mark what this process starts from now on, have it ended when this process has ended, and return the mark."""
    os.environ[NAME] = secrets.token_hex(8)
    mark = f"{NAME}={os.environ[NAME]}"
    if not hasattr(os, "pidfd_open"):
        return mark
    own = os.pidfd_open(os.getpid())
    os.set_inheritable(own, True)
    words = [sys.executable, "-I", "-S", __file__, str(own), mark]
    # In a session of its own: what ends this process's group must not end the one that looks after it.
    nowhere = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    os.posix_spawn(sys.executable, words, {}, file_actions=nowhere, setsid=True)
    os.close(own)
    return mark


def marked(mark: str) -> list[int]:
    """Return the processes that have this in the environment with which they were started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def end(mark: str) -> None:
    """End all processes with the mark, and those that they start meanwhile."""
    quiet = 0
    for _ in range(LOOKS):
        left = marked(mark)
        for each in left:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        quiet = 0 if left else quiet + 1
        if quiet == QUIET_LOOKS:
            return
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    select.select([int(sys.argv[1])], [], [])  # readable once the process has ended
    end(sys.argv[2])
