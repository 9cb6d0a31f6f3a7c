"""Files that are there in full or not at all, also after a power cut: flushed, renamed, and the folder flushed too."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from paceline.errors import StorageError

PARTIAL = ".partial-"  # what the name of a folder begins with that is not there in full yet


def sync_file(path: Path) -> None:
    """Make a file's content durable. Raises OSError."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where its file system can. Raises OSError."""
    try:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if (
            error.errno != errno.EINVAL
        ):  # what some network and FUSE file systems say to a folder: there is no such call
            raise


def make_folder(path: Path) -> None:
    """Make a folder and those above it, each of which is durable in its own when this returns. Raises OSError."""
    made = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in made or [path]:
        sync_folder(each.parent)


def publish(unfinished: Path, path: Path) -> None:
    """Give a finished file its name, in place of a file that has it: durable when this returns. Raises OSError.

    Content goes to the disk before the name: after a crash no name stands for half a file.
    """
    sync_file(unfinished)
    unfinished.replace(path)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, in full or not at all, in place of a file that is there: durable when this returns.

    Raises OSError, and then leaves what was there before.
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        publish(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def write_output(path: Path, text: str) -> None:
    """Write a file that a command was asked for, as `write_text` does: the one that a link leads to, where it is one.

    What is there and is no file is written into, such as a pipe or /dev/stdout, and stays what it is.
    Raises StorageError (exit code 74) where it cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path.resolve(), text)
    except OSError as error:
        because = error.strerror or str(error)
        raise StorageError(f"{path} cannot be written", because, "a path in a folder that is there") from error


def sync_all(folder: Path) -> None:
    """Make durable what another library wrote into a folder: its files' content, and their names. Raises OSError."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            sync_file(path)
    sync_folder(folder)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
