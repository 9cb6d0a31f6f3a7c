"""Where survivors on a machine bring their state together: in memory where there is room, else in the run's folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from paceline.lock import RunLock, try_lock
from paceline.supervise.told.generation import FROM_RANKS
from paceline.system.this_machine import RAM_DISK

_HELD: dict[Path, int] = {}  # descriptors of the folders of this process, locked (flock) for as long as it lives


def rescue_folder(lock: RunLock, generation: int) -> str:
    """Return the folder of a generation's rescue, which nobody else uses, or FROM_RANKS where none can be made.

    Only its user can read it, and no start of another run removes it while this process lives.
    """
    clear_rescues(lock)
    for parent in (RAM_DISK, lock.run_dir):
        folder = parent / f"{_name(lock)}{generation}"
        with contextlib.suppress(OSError):  # full, or not to be written to
            folder.mkdir(mode=0o700)
            _hold(folder)
            return str(folder)
    return FROM_RANKS


def clear_rescues(lock: RunLock) -> None:
    """Remove what is left of a run's rescues."""
    for parent in (RAM_DISK, lock.run_dir):
        for folder in parent.glob(f"{_name(lock)}*"):
            shutil.rmtree(folder, ignore_errors=True)
            if folder in _HELD:
                os.close(_HELD.pop(folder))


def _hold(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a file system whose folders cannot be opened, or locked
        _HELD[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try_lock(_HELD[folder])


def _name(lock: RunLock) -> str:
    # By the directory and not by the lock's token: who takes a run over removes what is left of its rescues.
    return f"paceline-rescue-{hashlib.blake2b(os.fsencode(lock.run_dir.resolve()), digest_size=8).hexdigest()}-"
