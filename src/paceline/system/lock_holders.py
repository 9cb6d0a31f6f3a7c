"""Which processes of this machine hold the lock (flock) of a file, and which of them stand still. Torch-free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROCESSES = Path("/proc")


@dataclass(frozen=True)
class FileHolder:
    """A process that holds the lock of a file; `is_stopped` by a signal (SIGSTOP, SIGTSTP)."""

    process: int
    is_stopped: bool


def holders_of(path: Path) -> list[FileHolder]:
    """Return who holds the lock of a file, by number, as far as this user may look into processes.

    The system names who has taken a lock, and not who has inherited it. So Linux is asked for the descriptors of each
    process, by their names: a file server that does not answer is not asked. Elsewhere nobody is known.
    """
    name = os.path.realpath(path)
    numbers = sorted(int(folder.name) for folder in PROCESSES.glob("[0-9]*"))
    return [FileHolder(number, is_stopped(number)) for number in numbers if any(_locks(number, name))]


def is_stopped(process: int) -> bool:
    """Return whether a process stands still by a signal, where the system says."""
    with contextlib.suppress(OSError, IndexError):
        return (PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _locks(process: int, name: str) -> Iterator[bool]:
    """Yield for each descriptor of a file of that name whether it holds the lock."""
    folder = PROCESSES / str(process)
    with contextlib.suppress(OSError):  # another user's, or one that has ended meanwhile
        for descriptor in os.listdir(folder / "fd"):  # noqa: PTH208 - names alone: a path each would cost more
            with contextlib.suppress(OSError):
                if os.readlink(folder / "fd" / descriptor) == name:  # noqa: PTH115 - compared as text
                    yield "\nlock:" in (folder / "fdinfo" / descriptor).read_text()
