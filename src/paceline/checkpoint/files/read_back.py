"""Whether files are what was written: read in full by several threads, piece by piece and file by file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.checkpoint.files.destinations import (
    NOWHERE,
    BytesInPlace,
    Destinations,
    copy_bytes,
    cut_off,
    read_spread,
    tell,
)
from paceline.checkpoint.files.digests import new_digest
from paceline.checkpoint.files.in_memory import PagesInMemory
from paceline.checkpoint.files.past_caches import BLOCK_BYTES, PastCaches, Rooms
from paceline.checkpoint.files.pieces import AHEAD, HANDS
from paceline.checkpoint.files.threads import Hands, at_once
from paceline.checkpoint.manifest import FileEntry
from paceline.errors import StorageError

READ_BYTES = 2**22  # at a time: a system reads on by itself, the further the more is asked for in order
COPIED_BYTES = 2**19  # at a time: they are hashed while they are in the cache
FEW_BYTES = 2**20  # of all files, that are sooner hashed than threads are started
NOTHING: Mapping[str, Destinations] = MappingProxyType({})


def verify_files(
    path: Path, files: Mapping[str, FileEntry], into: Mapping[str, Destinations] = NOTHING, past_caches: bool = False
) -> None:
    """Raise StorageError naming the first of the files in `path` whose content is not what was written.

    Several pieces of them are hashed at once: one core hashes more slowly than a disk reads. What has a destination
    comes there, and whether it is what was written is known when this returns. Where nobody else is to read the files
    soon they may come `past_caches` of the system, as far as it does not have them in its memory.
    """
    pending: deque[_Piece] = deque()
    count = HANDS * at_once() if sum(entry.bytes for entry in files.values()) > FEW_BYTES else 0
    with contextlib.ExitStack() as opened, Hands(count, "verify") as hands:
        for piece in _pieces(_open(path, files, into, opened, past_caches), hands):
            pending.append(piece)
            if len(pending) > AHEAD * count:
                pending.popleft().take()
        for piece in pending:
            piece.take()


@dataclass
class _File:
    """A file that is read, and what has been learnt of it."""

    path: Path
    entry: FileEntry
    content: Any
    digest: PiecesDigest
    into: Destinations
    past: PastCaches | None = None
    in_memory: PagesInMemory | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)  # of who reads: one after the other, in order

    @classmethod
    def opened(cls, path: Path, entry: FileEntry, into: Destinations, past_caches: bool) -> _File:
        """Open a file. Raises OSError."""
        made = cls(path, entry, path.open("rb", buffering=0), PiecesDigest(entry), into)
        descriptor = made.content.fileno()
        if past_caches and (length := os.fstat(descriptor).st_size) > FEW_BYTES:
            made.past, made.in_memory = PastCaches(path, descriptor, False), PagesInMemory(descriptor, length)
        return made

    def comes_past(self, begin: int, end: int) -> PastCaches | None:
        """Return what reads a part of the file past the caches; None where it is to come through them."""
        if self.past is None or self.in_memory is None or begin % BLOCK_BYTES or end - begin < FEW_BYTES:
            return None
        return None if not self.past.is_used or self.in_memory.has(begin, end) else self.past

    def close(self) -> None:
        """Close the file."""
        self.content.close()
        if self.past is not None and self.in_memory is not None:
            self.past.close()
            self.in_memory.close()

    def check(self) -> None:
        """Close the file. Raises StorageError where its content is not what was written."""
        self.close()
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
    past_caches: bool,
) -> Iterator[_File]:
    """Yield the files, open; they are closed with `opened` at the latest."""
    for name, entry in files.items():
        with _told(path / name):
            file = _File.opened(path / name, entry, into.get(name, NOWHERE), past_caches)
        opened.callback(file.close)
        yield file


def _pieces(files: Iterable[_File], hands: Hands) -> Iterator[_Piece]:
    """Yield the pieces of all files, each on its way to its digest."""
    rooms = Rooms(READ_BYTES)
    for file in files:
        with _told(file.path):
            length = os.fstat(file.content.fileno()).st_size
        step = file.entry.piece_bytes or max(1, length)
        for at in range(0, max(1, length), step):
            end = min(at + step, length)
            yield _Piece(file, hands.submit(_digest, file, at, end, rooms), at + step >= length)


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


def _digest(file: _File, at: int, end: int, rooms: Rooms) -> bytes:
    """Bring a part of a file to where it goes and return its digest; of fewer bytes where the file has become shorter.

    What is hashed are the bytes where they have come to. One thread at a time reads a file through the caches, while
    others hash: a disk whose system reads on by itself is faster so than one that is asked for several places at once.
    Past them it is the other way round.
    """
    digest, came = new_digest(file.entry.piece_digest), list[BytesInPlace]()
    with rooms.one() as room:
        for some in _read(file, at, end, room):
            for stretch in some:
                digest.update(stretch.content)
                came += [stretch] if stretch.to is not None else []
    tell(came)
    return digest.digest()


def _read(file: _File, at: int, end: int, room: memoryview) -> Iterator[Iterable[BytesInPlace]]:
    """Yield the stretches of a part of a file, read straight to where they go, or past the caches and copied there."""
    for first in range(at, end, READ_BYTES):
        wanted = min(READ_BYTES, end - first)
        found = file.into.places(first, room[:wanted])
        past = file.comes_past(first, first + wanted)
        if past is None:
            with file.turn:
                count = read_spread(file.content.fileno(), first, [each.content for each in found])
            yield found if count == wanted else cut_off(found, count)
        else:
            count = past.read(room[:wanted], first)
            yield from _spread(found if count == wanted else cut_off(found, count), room)
        if count < wanted:
            return


def _spread(stretches: Iterable[BytesInPlace], room: memoryview) -> Iterator[Iterable[BytesInPlace]]:
    """Yield stretches that lie in a room one after the other, each copied to where it goes, a little at a time."""
    at = 0
    for each in stretches:
        for begin in range(0, len(each.content), COPIED_BYTES):
            content = each.content[begin : begin + COPIED_BYTES]
            if each.to is not None:
                copy_bytes(content, room[at : at + len(content)])
            yield (BytesInPlace(content, each.to, each.at + begin),)
            at += len(content)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read {path}", str(error), "use an earlier checkpoint") from error
