"""Faults of storage: writes of checkpoints that fail as on a full disk, or are slow, and files that are damaged.

Writes are hindered by an audit hook of the interpreter, which may refuse to open a file, or take its time: whoever
writes a checkpoint meets a real OSError where it would, and no code of checkpoints knows of faults.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

ERRORS = {"disk_full": errno.ENOSPC, "read_only": errno.EROFS}
SMALLEST_BYTES = 512  # of a file that is damaged: weights, and not a note beside them
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def hinder_writes(below: Path, hindered: Callable[[], tuple[str, float]]) -> None:
    """Fail each opening of a file below a folder for writing with the error whose kind `hindered()` names, if any.

    Of a kind that is no error the opening takes as many seconds longer as `hindered()` says. It lasts as long as the
    process: an audit hook cannot be taken away.
    """
    prefix = os.fspath(below.absolute()) + os.sep

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open":
            return
        path, _, flags = arguments
        if isinstance(path, str | os.PathLike) and isinstance(flags, int) and flags & WRITES:
            name = os.path.abspath(path)  # noqa: PTH100 (a Path would be made for every file that is opened)
            if name.startswith(prefix) and not name.endswith(".lock"):
                kind, seconds = hindered()
                if kind in ERRORS:
                    raise OSError(ERRORS[kind], f"{os.strerror(ERRORS[kind])} (a fault made on purpose)", name)
                time.sleep(seconds)

    sys.addaudithook(hook)


def newest_file(below: Path) -> Path | None:
    """Return the newest published file of a checkpoint that holds weights, None where there is none yet.

    Other ranks publish and remove checkpoints meanwhile: what goes is passed over.
    """
    found = []
    for folder, folders, names in os.walk(below):  # which passes over folders that have gone
        folders[:] = [name for name in folders if not name.startswith(".")]  # a save under way
        for name in names:
            path = Path(folder) / name
            if name.startswith(".") or path.suffix == ".json":
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_size >= SMALLEST_BYTES:
                    found.append((status.st_mtime_ns, status.st_size, path))
    return max(found)[2] if found else None


def damage(path: Path, kind: str, drawn: float) -> None:
    """Flip one bit of a file (`corrupt`), or cut off its second half (`truncate`), and make that durable.

    A file that has just gone with its checkpoint can no longer be damaged.
    """
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        size = path.stat().st_size
        if kind == "truncate":
            file.truncate(size // 2)
        else:
            bit = int(drawn * size * 8)
            file.seek(bit // 8)
            byte = file.read(1)[0]
            file.seek(bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))
        file.flush()
        os.fsync(file.fileno())
