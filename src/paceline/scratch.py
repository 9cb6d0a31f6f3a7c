"""Folders that last as long as their process: the next process that makes one removes what a killed process left.

Each is locked (flock) by the process that made it; the system takes the lock away when the process is gone, however it
died. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from paceline.lock import try_lock

PREFIX = "paceline."
# Ranks of a supervisor that was killed save and end by themselves, and look for their folder meanwhile.
LEAST_SECONDS = 600.0


class Scratch(tempfile.TemporaryDirectory[str]):
    """A temporary folder for `what`, as `tempfile.TemporaryDirectory`, whose path a `with` block gets."""

    def __init__(self, what: str) -> None:
        self._locked = -1
        clear_scratch(Path(tempfile.gettempdir()))
        super().__init__(prefix=f"{PREFIX}{what}-", ignore_cleanup_errors=True)
        with contextlib.suppress(OSError):  # a file system whose folders cannot be locked: nobody removes it then
            self._locked = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try_lock(self._locked)

    def cleanup(self) -> None:
        """Remove the folder."""
        super().cleanup()
        if self._locked >= 0:
            os.close(self._locked)
            self._locked = -1


def clear_scratch(root: Path, now: float | None = None) -> None:
    """Remove this user's folders under `root` whose processes are gone; young ones may still have readers."""
    now = time.time() if now is None else now
    for folder in root.glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError):  # it is being removed, or this file system has no such locks
            found = folder.lstat()
            if found.st_uid != os.getuid() or now - found.st_mtime < LEAST_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
