"""A file's bytes in pieces, that several threads write and hash, or read back: one core hashes more slowly than a disk.

The digest of a file in pieces is the sha256 of its pieces' digests (digests.py), 32 bytes each, one after the other. A
file of one piece has the plain sha256 of its bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from paceline.checkpoint.files.destinations import copy_bytes
from paceline.checkpoint.files.digests import SHA256, best_kind, new_digest
from paceline.checkpoint.files.flushes import Flushes
from paceline.checkpoint.files.past_caches import PastCaches, Rooms
from paceline.checkpoint.files.threads import Hands, at_once
from paceline.checkpoint.manifest import FileEntry
from paceline.errors import StorageError

PIECE_BYTES = 2**22
AT_ONCE_BYTES = 2**20  # at most written, or read back: they stay in the cache while they are hashed, or compared
SHORT_BYTES, SHORT_ROOM_BYTES = 2**26, 2**18  # a file that is no longer goes through less memory at a time
AHEAD = 2  # pieces for each thread that wait for it
HANDS = 2  # threads for each that computes: a piece on its way to the disk or back takes none of a core
WORD = 8
T = TypeVar("T")


def write_in_pieces(path: Path, content: Iterable[memoryview], flushes: Flushes, expected: int) -> FileEntry:
    """Write a new file and return its length and digest; the disk has it when the flushes are made.

    A file that is `expected` to be short goes through less memory, which a run at its peak would notice. Each piece is
    hashed while it is in the caches, and goes past the system's memory where the file system allows that; else the disk
    takes what is there meanwhile. Raises OSError.
    """
    file = path.open("x+b", buffering=0)
    flushes.add(file)
    digests, length, kind = list[bytes](), 0, best_kind() if expected > PIECE_BYTES else SHA256
    with contextlib.ExitStack() as opened:
        caches = PastCaches(path, file.fileno(), True)
        writer = opened.enter_context(contextlib.closing(_Writer(caches, expected, kind)))
        flush = _Flush(opened.enter_context(Hands(1, "flush")), file.fileno())
        for digest, taken in opened.enter_context(contextlib.closing(_by_hands(writer.put, content))):
            digests.append(digest)
            length += taken
            if not writer.file.is_used:
                flush.again()
        flush.end()
    if len(digests) == 1 and kind == SHA256:
        return FileEntry(length, digests[0].hex())
    return FileEntry(length, hashlib.sha256(b"".join(digests)).hexdigest(), PIECE_BYTES, kind)


def compare_in_pieces(path: Path, content: Iterable[memoryview]) -> None:
    """Raise StorageError where a file is not this content, read from the disk itself where its file system allows that.

    Raises OSError where it cannot be read.
    """
    length = 0
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(path.open("rb", buffering=0))
        caches, here = PastCaches(path, file.fileno(), False), os.fstat(file.fileno()).st_size
        reader = opened.enter_context(contextlib.closing(_Comparer(caches, here)))
        for is_equal, taken in opened.enter_context(contextlib.closing(_by_hands(reader.is_equal, content))):
            length += taken
            if not is_equal:
                raise _damaged(path)
        if here != length:
            raise _damaged(path)


def _damaged(path: Path) -> StorageError:
    because = "what is read back is not what was written a moment ago"
    return StorageError(f"{path} is damaged", because, "use an earlier checkpoint, and look at this storage")


def _by_hands(
    call: Callable[[int, list[memoryview]], T], content: Iterable[memoryview]
) -> Generator[tuple[T, int], None, None]:
    """Yield what a call says of each piece of the content in turn, and the piece's length. Several threads make it.

    They have ended when the generator is closed.
    """
    pending: deque[tuple[Future[T], int]] = deque()
    count, at = HANDS * at_once(), 0
    with Hands(count, "piece") as hands:
        try:
            for parts in cut(content, PIECE_BYTES):
                length = sum(map(len, parts))
                pending.append((hands.submit(call, at, parts), length))
                at += length
                if len(pending) > AHEAD * count:
                    future, length = pending.popleft()
                    yield future.result(), length
            while pending:
                future, length = pending.popleft()
                yield future.result(), length
        finally:
            for future, _ in pending:
                future.cancel()


def cut(content: Iterable[memoryview], length: int) -> Iterator[list[memoryview]]:
    """Yield the content in pieces of so many bytes, each as the parts that it is made of."""
    parts: list[memoryview] = []
    held = 0
    for part in content:
        at = 0
        while at < len(part):
            parts.append(part[at : at + length - held])
            at, held = at + len(parts[-1]), held + len(parts[-1])
            if held == length:
                yield parts
                parts, held = [], 0
    if held:
        yield parts


@dataclass
class _Flush:
    """Has the disk take what the system's memory has of a file, beside the writing."""

    hands: Hands
    descriptor: int
    under_way: Future[None] | None = None

    def again(self) -> None:
        """Begin to, unless it is being done."""
        if self.under_way is None or self.under_way.done():
            self.end()
            self.under_way = self.hands.submit(os.fdatasync, self.descriptor)

    def end(self) -> None:
        """Wait for it. Raises OSError: the disk tells of an error once."""
        if self.under_way is not None:
            self.under_way.result()


def _room_bytes(length: int) -> int:
    """Return how many bytes of a file of this length are written, or read back, at a time."""
    return SHORT_ROOM_BYTES if length <= SHORT_BYTES else AT_ONCE_BYTES


class _Writer:
    """Puts pieces into a file."""

    def __init__(self, file: PastCaches, expected: int, kind: str) -> None:
        self.file, self._step, self._kind = file, _room_bytes(expected), kind
        self._rooms = Rooms(self._step)

    def put(self, at: int, parts: list[memoryview]) -> bytes:
        """Write a piece at its place, as much at a time as a room holds, and return its digest."""
        digest = new_digest(self._kind)
        with self._rooms.one() as room:
            for some in cut(parts, self._step):
                length = 0
                for part in some:
                    copy_bytes(room[length : length + len(part)], part)
                    length += len(part)
                digest.update(room[:length])
                self.file.write(room[:length], at)
                at += length
        return digest.digest()

    def close(self) -> None:
        """Close what was opened beside the file."""
        self.file.close()


class _Comparer:
    """Reads pieces of a file."""

    def __init__(self, file: PastCaches, length: int) -> None:
        self._file, self._step = file, _room_bytes(length)
        self._rooms = Rooms(self._step)

    def is_equal(self, at: int, parts: list[memoryview]) -> bool:
        """Return whether the file has a piece at its place."""
        with self._rooms.one() as room:
            length, here = sum(map(len, parts)), at
            rest = deque(parts)
            while here < at + length:
                read = room[: min(self._step, at + length - here)]
                if self._file.read(read, here) != len(read):
                    return False
                here += len(read)
                while read:
                    part = rest.popleft()
                    if not _equal(part[: len(read)], read[: len(part)]):
                        return False
                    if len(part) > len(read):
                        rest.appendleft(part[len(read) :])
                    read = read[len(part) :]
        return True

    def close(self) -> None:
        """Close what was opened beside the file."""
        self._file.close()


def _equal(written: memoryview, read: memoryview) -> bool:
    """Return whether as many bytes are the same, compared by words, which is four times as fast."""
    whole = len(written) - len(written) % WORD
    if whole and not np.array_equal(
        np.frombuffer(written[:whole], dtype=np.uint64), np.frombuffer(read[:whole], dtype=np.uint64)
    ):
        return False
    return bytes(written[whole:]) == bytes(read[whole:])
