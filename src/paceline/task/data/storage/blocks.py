"""The block cache: pieces of remote files on local disk, of a bounded size, shared by all processes of a machine.

    ROOT/HH/KEY.block   a piece, and after it 16 bytes of its BLAKE2b hash; HH are the first two letters of KEY
    ROOT/HH/lock        held by whoever fetches or removes in this folder: no piece is fetched twice at a time;
                        pieces that lie near each other in a file are in one folder
    ROOT/usage          bytes of all pieces, as far as is known; its lock is held by whoever makes room

A piece is written beside its place and renamed: no reader sees half of one. Pieces that were not used for longest go
first. A piece that does not match its hash is fetched again. A reader may keep a piece mapped that is removed: the
system keeps its bytes for as long as it is mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from paceline.errors import StorageError
from paceline.task.data.storage.locked import unlock
from paceline.task.data.storage.notices import DataNotices

Bytes = npt.NDArray[np.uint8]

HASH_BYTES = 16
ROOM_SHARE = 0.9  # what is kept of a full cache, so that not every further piece makes room
MAPPED = 8192  # pieces that a process keeps mapped


class BlockCache:
    """Pieces by their keys. Any thread and any process may use one; a key always stands for the same bytes."""

    def __init__(self, root: Path, most_bytes: int, notices: DataNotices | None = None) -> None:
        """Keep pieces below `root`, at most `most_bytes` of them together."""
        self.root, self.most_bytes, self.notices = root, most_bytes, notices
        self._mapped: OrderedDict[str, Bytes] = OrderedDict()
        self._mapped_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str, fetch: Callable[[], bytes]) -> Bytes:
        """Return the piece of that key, from the disk or by `fetch()`. Raises what `fetch` raises, and StorageError."""
        return self.get_row([key], lambda first, stop: [fetch()])[0]

    def get_row(self, keys: Sequence[str], fetch: Callable[[int, int], Sequence[bytes]]) -> list[Bytes]:
        """Return pieces that lie in a row in their file: from the disk, or every run of missing ones by one `fetch`.

        `fetch(first, stop)` returns the pieces of keys[first:stop]. All keys begin with the same two letters: while one
        process fetches for a folder, no other does. Raises what `fetch` raises, and StorageError.
        """
        with self._lock:
            known = {key: piece for key in keys if (piece := self._mapped.get(key)) is not None}
            found = {key: piece for key, piece in known.items() if _is_whole(self._path(key), piece)}
            for key in known.keys() - found.keys():  # its pages are gone: to touch one would end the process
                self._mapped_bytes -= len(self._mapped.pop(key))
            for key in found:
                self._mapped.move_to_end(key)
        if len(found) < len(keys):
            with self._written():
                self._find(keys, found)
                if len(found) < len(keys):
                    self._fetch_others(keys, found, fetch)
            for key in keys:
                self._keep(key, found[key])
        return [found[key] for key in keys]

    def _fetch_others(
        self, keys: Sequence[str], found: dict[str, Bytes], fetch: Callable[[int, int], Sequence[bytes]]
    ) -> None:
        """Add to what was found the pieces that are not there, fetched by one process at a time."""
        with _locked(self._path(keys[0]).parent / "lock"):
            self._find(keys, found)  # another process may have fetched some meanwhile
            for first, stop in _runs_without(keys, found):
                for key, content in zip(keys[first:stop], fetch(first, stop), strict=True):
                    found[key] = self._store(self._path(key), content)

    def has(self, key: str) -> bool:
        """Return whether the piece is there, sound or not. A piece that was asked for stays longer than others."""
        with self._lock:
            if key in self._mapped:
                self._mapped.move_to_end(key)
                return True
        return self._path(key).exists()

    def forget(self, key: str) -> None:
        """Remove a piece, which is not what its key stands for."""
        with self._lock:
            if (known := self._mapped.pop(key, None)) is not None:
                self._mapped_bytes -= len(known)
        self._path(key).unlink(missing_ok=True)

    def _keep(self, key: str, piece: Bytes) -> None:
        """Keep a piece mapped: a removed one takes room for as long, so that these are bounded like the cache."""
        with self._lock:
            if key not in self._mapped:
                self._mapped_bytes += len(piece)
            self._mapped[key] = piece
            while self._mapped and (len(self._mapped) > MAPPED or self._mapped_bytes > self.most_bytes):
                self._mapped_bytes -= len(self._mapped.popitem(last=False)[1])

    def _find(self, keys: Sequence[str], found: dict[str, Bytes]) -> None:
        """Add those pieces to `found` that are on the disk."""
        for key in keys:
            if key not in found and (piece := self._load(self._path(key))) is not None:
                found[key] = piece

    def _load(self, path: Path) -> Bytes | None:
        """Return a piece that is on the disk, noting that it is used; None where it is not there or damaged."""
        try:
            if path.stat().st_size < HASH_BYTES:
                raise ValueError("it is shorter than its hash")
            whole = np.memmap(path, dtype=np.uint8, mode="r")
            piece, recorded = whole[:-HASH_BYTES], whole[-HASH_BYTES:].tobytes()
            if _hash(piece) != recorded:
                raise ValueError("it does not match its hash")
            os.utime(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            path.unlink(missing_ok=True)
            if self.notices is not None:
                self.notices.tell("a piece of the block cache was dropped", str(error))
            return None
        return piece

    def _store(self, path: Path, content: bytes) -> Bytes:
        """Write a piece, after making room for it, and return it. One that has no room is returned all the same."""
        piece = np.frombuffer(content, dtype=np.uint8)
        size = len(content) + HASH_BYTES
        if size > self.most_bytes:
            return piece
        self._make_room(size, path.parent)
        beside = path.with_suffix(".part")  # the folder's lock is held: there is one writer
        with beside.open("wb") as stream:
            stream.write(content)
            stream.write(_hash(piece))
        beside.replace(path)
        stored = self._load(path)
        return piece if stored is None else stored  # another process may have made room with it

    def _make_room(self, size: int, held: Path) -> None:
        """Count `size` bytes more, and remove pieces where they do not fit. The lock of the folder `held` is held."""
        with _locked(self.root / "usage") as stream:
            recorded = stream.read(32).strip()
            used = int(recorded) if recorded.isdigit() else self.most_bytes  # not known: it is counted
            if used + size > self.most_bytes:
                used = self._remove_oldest(int(self.most_bytes * ROOM_SHARE) - size, held)
            stream.seek(0)
            stream.truncate()
            stream.write(b"%d" % (used + size))

    def _remove_oldest(self, keep_bytes: int, held: Path) -> int:
        """Remove the pieces that were not used for longest, until at most `keep_bytes` stay; return what stays."""
        pieces = []
        for folder in self._folders():
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    found = path.stat()
                    if path.suffix == ".block":
                        pieces.append((found.st_mtime_ns, found.st_size, path))
                    elif path.suffix == ".part" and (folder == held or _is_free(folder / "lock")):
                        path.unlink()  # left by a process that died
        used = sum(size for _, size, _ in pieces)
        for _, size, path in sorted(pieces, key=lambda piece: piece[:2]):
            if used <= keep_bytes:
                break
            path.unlink(missing_ok=True)
            used -= size
        return used

    def _folders(self) -> list[Path]:
        return [folder for folder in self.root.iterdir() if folder.is_dir()]

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.block"

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"the block cache in {self.root} cannot be written", f"{error.strerror or error}",
                'name a folder with room: task.data.cache_dir = "/path", or lower task.data.cache_limit',
            ) from error  # fmt: skip

    def __reduce__(self) -> tuple[object, ...]:
        return BlockCache, (self.root, self.most_bytes, self.notices)


def _runs_without(keys: Sequence[str], found: dict[str, Bytes]) -> list[tuple[int, int]]:
    """Return (first, stop) of each run of keys that were not found."""
    runs: list[tuple[int, int]] = []
    for place, key in enumerate(keys):
        if key not in found:
            first = runs.pop()[0] if runs and runs[-1][1] == place else place
            runs.append((first, place + 1))
    return runs


def _is_whole(path: Path, piece: Bytes) -> bool:
    """Return whether a mapped piece has all its pages still. One that was removed has: its name alone is gone."""
    try:
        return path.stat().st_size == len(piece) + HASH_BYTES
    except FileNotFoundError:
        return True


def _hash(piece: Bytes) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(piece).data, digest_size=HASH_BYTES).digest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Hold a file's lock, made where it is not there. A file system without locks costs a second fetch at most."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as stream:  # noqa: PTH123 (made and opened at once)
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)  # the system lets go of it when the process ends, however it ends
        try:
            yield stream
            stream.flush()
        finally:
            unlock(stream)


def _is_free(lock: Path) -> bool:
    """Return whether nobody fetches in a lock's folder."""
    try:
        with lock.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
