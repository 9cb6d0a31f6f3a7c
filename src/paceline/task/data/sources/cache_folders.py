"""Folders of a cache: made beside, moved into place whole, by one process at a time where the file system has locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from paceline.errors import StorageError
from paceline.task.data.storage.locked import unlock
from paceline.units import format_bytes

Kept = TypeVar("Kept")


@contextlib.contextmanager
def written_to(root: Path) -> Iterator[None]:
    """Turn a failure of the file system into a StorageError that names the cache."""
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f"; {format_bytes(shutil.disk_usage(root).free)} are free"
        raise StorageError(
            f"the token cache in {root} cannot be written",
            f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}{free}",
            'name a folder with room: task.data.cache_dir = "/path"',
        ) from error


@contextlib.contextmanager
def lock_of(root: Path, signature: str) -> Iterator[bool]:
    """Wait until no other process builds the same corpus. Gives False where the file system has no locks."""
    path = root / "locks" / f"{signature}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)  # the kernel releases it when the process ends, however it ends
        except OSError:
            yield False
        else:
            try:
                yield True
            finally:
                unlock(stream)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    beside.write_text(text)
    beside.replace(path)


def build_folder(
    final: Path, signature: str, alone: bool, write: Callable[[Path], None], load: Callable[[Path], Kept | None]
) -> Kept:
    """Have a folder written beside its place and moved there when it is complete; return what `load` finds there.

    `alone` says that nobody else builds for this signature: what a dead builder has left is removed then. Raises as
    publish_folder.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    if alone:
        for left_by_a_dead_builder in final.parent.glob(f".{signature}.*"):
            shutil.rmtree(left_by_a_dead_builder, ignore_errors=True)
    beside = final.parent / f".{signature}.{secrets.token_hex(8)}"
    beside.mkdir()
    try:
        write(beside)
        return publish_folder(beside, final, load)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # published, it is no longer there


def publish_folder(beside: Path, final: Path, load: Callable[[Path], Kept | None]) -> Kept:
    """Move a complete folder into its place, unless another process put one there first; return what `load` finds.

    `load` returns None for a folder that is not whole. Raises StorageError where the disk does not keep what it takes.
    """
    for _ in range(3):
        try:
            beside.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            other = load(final)
            if other is not None:
                return other
            damaged = final.with_name(f".damaged.{secrets.token_hex(8)}")
            with contextlib.suppress(FileNotFoundError):  # another process moved it first
                final.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            kept = load(final)
            if kept is not None:
                return kept
            break
    raise StorageError(
        "the token cache does not keep what is written to it",
        f"what was written to {final} is not what is read from it",
        "check the disk, or name another cache_dir",
    )


def hash_of(value: object) -> str:
    """Return a hash of plain data."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def index_path(root: Path, signature: str) -> Path:
    """Return the file of a cache that says what the files of a signature became."""
    return root / "index" / f"{signature}.json"
