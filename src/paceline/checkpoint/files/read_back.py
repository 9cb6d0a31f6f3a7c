"""Whether files are what was written: read in full by several threads, piece by piece and file by file."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.checkpoint.files.destinations import NOWHERE, BytesInPlace, Comers, Destinations, cut_off, read_spread
from paceline.checkpoint.files.digests import new_digest
from paceline.checkpoint.files.past_caches import Rooms
from paceline.checkpoint.files.pieces import AHEAD
from paceline.checkpoint.files.threads import Hands, at_once
from paceline.checkpoint.manifest import FileEntry
from paceline.errors import StorageError

READ_BYTES = 2**22  # at a time: a system reads on by itself, the further the more is asked for in order
AHEAD_BYTES = 2**26  # that a system reads before it is known where they go
# Of one request for that: Linux cuts a longer one down to the disk's own largest or what it reads ahead by itself,
# 128 KiB as it comes, and reads no more of it. Of one for 64 MiB a virtual disk of ours read 8 (2026-11-29).
ADVISED_BYTES = 2**17
SLICE_BYTES = 2**20  # hashed, and then summed while they are in a cache: the interpreter takes its time for each slice
FEW_BYTES = 2**20  # of all files, that are sooner hashed than threads are started
NOTHING: Mapping[str, Destinations] = MappingProxyType({})


def verify_files(path: Path, files: Mapping[str, FileEntry], into: Mapping[str, Destinations] = NOTHING) -> None:
    """Raise StorageError naming the first of the files in `path` whose content is not what was written.

    This thread reads one piece after the other, as a disk is fastest, and others hash them meanwhile. What has a
    destination comes there, and whether it is what was written is known when this returns.
    """
    pending: deque[_Piece] = deque()
    count = _hashing(files.values())
    with contextlib.ExitStack() as opened, Hands(count, "verify") as hands:
        for piece in _pieces(_open(path, files, into, opened), hands):
            pending.append(piece)
            if len(pending) > count + AHEAD:
                pending.popleft().take()
        for piece in pending:
            piece.take()


def read_ahead(path: Path, files: Mapping[str, FileEntry]) -> None:
    """Have the system read the beginning of what `verify_files` reads, beside the caller, where it can be told to.

    The disk would be idle until a load knows where everything goes: the longer, the more tensors there are.
    """
    left = AHEAD_BYTES if hasattr(os, "posix_fadvise") else 0
    with contextlib.suppress(OSError):  # who reads the file tells of it
        for name, entry in files.items():
            if left <= 0:
                return
            with (path / name).open("rb", buffering=0) as file:
                for at in range(0, min(left, entry.bytes), ADVISED_BYTES):
                    os.posix_fadvise(file.fileno(), at, ADVISED_BYTES, os.POSIX_FADV_WILLNEED)
            left -= entry.bytes


def _hashing(files: Collection[FileEntry]) -> int:
    """Return how many threads hash files. The one that reads beside them waits for the disk, or copies and is short."""
    return at_once() if sum(entry.bytes for entry in files) > FEW_BYTES else 0


@dataclass
class _File:
    """A file that is read, and what has been learnt of it."""

    path: Path
    entry: FileEntry
    content: Any
    digest: PiecesDigest
    into: Destinations

    def check(self) -> None:
        """Close the file. Raises StorageError where its content is not what was written."""
        self.content.close()
        if self.digest.hexdigest() != self.entry.sha256:
            because = "its sha256 is not the manifest's, so its content changed after it was written"
            raise StorageError(f"{self.path} is damaged", because, "use an earlier checkpoint")


@dataclass
class _Piece:
    file: _File
    future: Future[bytes]
    is_last: bool

    def take(self) -> None:
        """Wait for the piece's digest; after the last one look at the file's. Raises StorageError."""
        with _told(self.file.path):
            digest = self.future.result()
        if self.file.entry.piece_bytes:
            self.file.digest.add(digest)
        else:
            self.file.digest.is_(digest)
        if self.is_last:
            self.file.check()


def _open(
    path: Path,
    files: Mapping[str, FileEntry],
    into: Mapping[str, Destinations],
    opened: contextlib.ExitStack,
) -> Iterator[_File]:
    """Yield the files, open; they are closed with `opened` at the latest."""
    for name, entry in files.items():
        with _told(path / name):
            content = opened.enter_context((path / name).open("rb", buffering=0))
        yield _File(path / name, entry, content, PiecesDigest(entry), into.get(name, NOWHERE))


def _pieces(files: Iterable[_File], hands: Hands) -> Iterator[_Piece]:
    """Yield the pieces of all files, each on its way to its digest."""
    rooms = Rooms(READ_BYTES)
    for file in files:
        with _told(file.path):
            length = os.fstat(file.content.fileno()).st_size
        step = file.entry.piece_bytes or max(1, length)
        for at in range(0, max(1, length), step):
            end = min(at + step, length)
            in_turn = _read_in_turn if end - at <= READ_BYTES else _read_by_hand
            yield _Piece(file, in_turn(file, at, end, rooms, hands), at + step >= length)


class PiecesDigest:
    """The digest of a file from those of its pieces, or from its bytes as they come; plain where pieces have none."""

    def __init__(self, entry: FileEntry) -> None:
        self._piece_bytes, self._kind, self._held = entry.piece_bytes, entry.piece_digest, 0
        self._whole, self._piece = hashlib.sha256(), new_digest(self._kind)
        self._known = b""

    def add(self, digest: bytes) -> None:
        """Take the digest of the next piece."""
        self._whole.update(digest)

    def is_(self, digest: bytes) -> None:
        """Take the digest of the whole file."""
        self._known = digest

    def update(self, content: bytes) -> None:
        """Take the next bytes."""
        if not self._piece_bytes:
            self._whole.update(content)
            return
        rest = memoryview(content)
        while rest:
            part = rest[: self._piece_bytes - self._held]
            self._piece.update(part)
            self._held, rest = self._held + len(part), rest[len(part) :]
            if self._held == self._piece_bytes:
                self._end_piece()

    def hexdigest(self) -> str:
        """Return the digest of what was taken."""
        if self._held:
            self._end_piece()
        return (self._known or self._whole.digest()).hex()

    def _end_piece(self) -> None:
        self.add(self._piece.digest())
        self._piece, self._held = new_digest(self._kind), 0


def _read_in_turn(file: _File, at: int, end: int, rooms: Rooms, hands: Hands) -> Future[bytes]:
    """Bring a piece of a file to where it goes, and return its digest, on its way.

    It is that of the bytes where they have come to, and of fewer where the file has become shorter.
    """
    room = rooms.take()

    def hashed(stretches: Iterable[BytesInPlace]) -> bytes:
        try:
            return _digest(file, [stretches])
        finally:
            rooms.give(room)

    try:
        return hands.submit(hashed, _read(file, at, room[: end - at]))
    except OSError as error:
        rooms.give(room)
        failed: Future[bytes] = Future()  # which counts when what comes before it was well
        failed.set_exception(error)
        return failed


def _read_by_hand(file: _File, at: int, end: int, rooms: Rooms, hands: Hands) -> Future[bytes]:
    """Do so with a piece that is read a little at a time, by one thread: no other can hash what comes next in it."""

    def hashed() -> bytes:
        with rooms.one() as room:
            firsts = range(at, end, READ_BYTES)
            return _digest(file, (_read(file, first, room[: min(READ_BYTES, end - first)]) for first in firsts))

    return hands.submit(hashed)


def _digest(file: _File, read: Iterable[Iterable[BytesInPlace]]) -> bytes:
    """Return the digest of what was read of a piece, and tell the destinations that it is there."""
    digest, came = new_digest(file.entry.piece_digest), Comers()
    for stretches in read:
        for stretch in stretches:
            for part in stretch.in_slices(SLICE_BYTES) if len(stretch.content) > SLICE_BYTES else (stretch,):
                digest.update(part.content)
                came.add(part)
    came.tell()
    return digest.digest()


def _read(file: _File, at: int, room: memoryview) -> list[BytesInPlace]:
    """Return stretches of a file, as many bytes as the room has or the file, read straight to where they go."""
    found = file.into.places(at, room)
    count = read_spread(file.content.fileno(), at, [each.content for each in found])
    return found if count == len(room) else [each for each in cut_off(found, count) if each.content]


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read {path}", str(error), "use an earlier checkpoint") from error
