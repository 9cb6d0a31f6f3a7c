"""The folder that holds a run's checkpoints: names, which are complete, which is newest, publishing and clearing.

    step-00000100/                     a complete checkpoint
    step-00000100.1/                   the same step saved again by a resumed run; the first is left as it is
    .partial-step-00000200-TOKEN/      a save under way, or what a killed one left
    .partial-step-00000200-TOKEN.lock  locked (flock) by the saving process for as long as it lives

A checkpoint appears under its final name by one rename, so it is there in full or not at all. A lock ends with its
process, on whichever machine that runs; a partial folder that nobody has locked is therefore rubbish.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.files.read_back import verify_files
from paceline.checkpoint.index import read_index
from paceline.checkpoint.manifest import FileEntry, Manifest, read_manifest
from paceline.checkpoint.tiers.retention import Retention
from paceline.durable import PARTIAL, sync_folder
from paceline.errors import StorageError
from paceline.lock import try_lock

_NAME = re.compile(r"step-([0-9]{8,})(?:\.([0-9]+))?")
_LOCK = ".lock"


@dataclass(frozen=True)
class Found:
    """A checkpoint whose manifest is sound and whose files have their lengths; their content is not read."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Listing:
    """The complete checkpoints of a folder, newest first, and why each other one was passed over."""

    complete: tuple[Found, ...]
    skipped: tuple[str, ...]


def list_checkpoints(root: Path, lengths: bool = True) -> Listing:
    """Return the checkpoints under `root`, newest first. A missing folder is an empty one.

    Without `lengths` a checkpoint is one whose manifest is sound: a large world's ranks look for the files, each for
    its share. Newest is the highest sequence number in the manifests, then step and name, should two savers have drawn
    the same.
    """
    complete, skipped = [], []
    try:
        folders = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    except OSError as error:
        # What a file server says once of a folder that is there would have the next checkpoint count as the oldest.
        if not isinstance(error, FileNotFoundError) or root.is_dir():
            raise StorageError(f"cannot list the checkpoints in {root}", str(error), "check run.dir") from error
        folders = []
    for path in sorted(folders):
        try:
            manifest = read_manifest(path)
            check_lengths(path, manifest.files if lengths else {})
            complete.append(Found(path, manifest))
        except StorageError as error:
            skipped.append(f"{error.what}: {error.because}")
    complete.sort(key=lambda found: (found.manifest.sequence, found.manifest.step, found.path.name), reverse=True)
    return Listing(tuple(complete), tuple(skipped))


def checkpoint_name(step: int) -> str:
    """Return the name of the first checkpoint of a step."""
    return f"step-{step:08d}"


def find_latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under `root`, or None. `list_checkpoints` says why others were skipped."""
    complete = list_checkpoints(root).complete
    return complete[0].path if complete else None


def check_lengths(path: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise StorageError naming the first of a checkpoint's files that is missing or is not as long as it should be."""
    for name, entry in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            because = f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error}"
            raise StorageError(f"{path} is not a complete checkpoint", because, "use an earlier checkpoint") from error
        if size != entry.bytes:
            because = f"{name} has {size} bytes, not {entry.bytes}"
            raise StorageError(f"{path} is not a complete checkpoint", because, "use an earlier checkpoint")


def has_share(path: Path, number: int, count: int) -> bool:
    """Return whether one of `count` shares of a checkpoint's files is there, each file in its length."""
    try:
        check_lengths(path, read_manifest(path).share(number, count))
    except StorageError:
        return False
    return True


def verify_checkpoint(path: Path) -> Manifest:
    """Return the manifest after reading every file in full; raise StorageError naming the first damaged one."""
    manifest = read_manifest(path)
    check_lengths(path, manifest.files)
    verify_files(path, manifest.files)
    read_index(path, manifest)
    return manifest


@dataclass
class Partial:
    """A save under way: its folder, and the descriptor whose lock says that the saving process lives; -1 after it."""

    folder: Path
    lock: int

    def discard(self) -> None:
        """Remove the folder as far as possible and let go of the lock; what stays is cleared by a later save."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._let_go()

    def publish(self, step: int) -> Path:
        """Rename the folder to its final name, make the name durable, and return it.

        An existing checkpoint of the step is never touched: the next free of step-N, step-N.1, step-N.2 ... is taken.
        """
        sync_folder(self.folder)
        root, attempt = self.folder.parent, 0
        while True:
            target = root / (checkpoint_name(step) + (f".{attempt}" if attempt else ""))
            try:
                self.folder.rename(target)  # atomic; refuses a target that is a file or holds anything
                break
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                attempt += 1
        sync_folder(root)
        self._let_go()
        return target

    def _let_go(self) -> None:
        """Let go of the lock once: an interrupt may come in between, and by then another file may have its number."""
        lock, self.lock = self.lock, -1
        if lock >= 0:
            _let_go(self.folder, lock)


def create_partial(root: Path, step: int) -> Partial:
    """Create and lock a new partial folder for the step. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / f"{PARTIAL}step-{step:08d}-{secrets.token_hex(4)}"
        lock = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Between the two calls another save may have taken the lock file for a dead one's and removed it.
            if try_lock(lock) is not False and os.fstat(lock).st_nlink:
                folder.mkdir()
                return Partial(folder, lock)
        except BaseException:
            _let_go(folder, lock)
            raise
        os.close(lock)


def clear_partials(root: Path) -> list[str]:
    """Remove what killed saves left under `root`; return why something was left, for the caller to report."""
    kept = []
    try:
        names = {path.name.removesuffix(_LOCK) for path in root.iterdir() if path.name.startswith(PARTIAL)}
    except OSError as error:
        return [f"what killed saves left in {root} stays: {error}"]
    for folder in (root / name for name in sorted(names)):
        try:
            with _dead(folder) as dead:
                if dead is None:
                    kept.append(f"{folder} stays: this file system has no locks, so its save may be alive")
                elif dead:
                    _remove(folder)
                    _lock_of(folder).unlink(missing_ok=True)
        except OSError as error:
            kept.append(f"{folder} stays: {error}")
    return kept


def remove_old(root: Path, retention: Retention, newest: Path) -> tuple[list[str], list[str]]:
    """Remove the complete checkpoints that need not stay, never `newest`; return (names, why others stay).

    Folders that are not sound checkpoints are neither counted nor removed.
    """
    try:
        complete = list_checkpoints(root).complete
    except StorageError as error:  # the new one is there all the same
        return [], [f"old checkpoints stay: {error.what}: {error.because}"]
    aside, kept = set_aside(root, retention, newest, complete)
    removed, more = remove_aside(aside)
    return removed, kept + more


def set_aside(
    root: Path, retention: Retention, newest: Path, complete: Sequence[Found]
) -> tuple[dict[str, Path], list[str]]:
    """Rename what need not stay, never `newest`, out of sight; return where it is by its name, and why others stay.

    A removal that is cut short then leaves no half checkpoint behind.
    """
    aside: dict[str, Path] = {}
    kept = []
    pairs = [(found.path, found.manifest) for found in complete]
    for path in retention.doomed(pairs, datetime.datetime.now(datetime.UTC)):
        if path != newest:
            hidden = root / f"{PARTIAL}{path.name}-{secrets.token_hex(4)}"
            try:
                aside[path.name] = path.rename(hidden)
            except OSError as error:
                kept.append(f"{path} stays: {error}")
    return aside, kept


def remove_aside(aside: Mapping[str, Path]) -> tuple[list[str], list[str]]:
    """Delete what was set aside; return its names, and why something stays."""
    removed, kept = [], []
    for name, hidden in aside.items():
        try:
            _remove(hidden)
            removed.append(name)
        except OSError as error:
            kept.append(f"{hidden.with_name(name)} stays: {error}")
    return removed, kept


def withdraw(path: Path) -> None:
    """Remove a checkpoint as far as its disk lets that be done: out of sight first, so that no half of it is left."""
    doomed = path.with_name(f"{PARTIAL}{path.name}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):  # nothing that is otherwise than it was written is ever loaded
        path.rename(doomed)
        _remove(doomed)


def _remove(folder: Path) -> None:
    """Delete a folder that another process may be deleting too; of a link to one, the link alone."""
    with contextlib.suppress(FileNotFoundError):
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)


def _let_go(folder: Path, lock: int) -> None:
    """Remove the lock file of a partial folder, and let go of the lock whether or not the disk takes the change."""
    try:
        with contextlib.suppress(OSError):  # a disk that takes none any more: a later save clears what stays
            _lock_of(folder).unlink()
    finally:
        os.close(lock)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


@contextlib.contextmanager
def _dead(folder: Path) -> Iterator[bool | None]:
    """Yield whether the partial folder's saver is gone, holding its lock meanwhile; None where that cannot be told."""
    try:
        lock = os.open(_lock_of(folder), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True  # the lock file is created before the folder and removed after it
        return
    try:
        yield try_lock(lock)
    finally:
        os.close(lock)
