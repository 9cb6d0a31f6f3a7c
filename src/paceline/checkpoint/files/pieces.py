"""A file's bytes in pieces, that several threads write, hash and read back: one core hashes more slowly than a disk.

The digest of a file in pieces is the sha256 of its pieces' sha256, 32 bytes each, one after the other. A file of one
piece has the plain sha256 of its bytes.
"""

from __future__ import annotations

import hashlib
import os
import queue
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.checkpoint.files.past_caches import PastCaches, page_room
from paceline.checkpoint.files.threads import Hands, at_once
from paceline.checkpoint.manifest import FileEntry
from paceline.errors import StorageError

PIECE_BYTES = 2**22
READ_BACK_BYTES = 2**20  # at a time
AHEAD = 2  # pieces for each thread that wait for it
HANDS = 2  # threads for each that computes: a piece on its way to the disk or back takes none of a core
WORD = 8


def write_in_pieces(path: Path, content: Iterable[memoryview]) -> FileEntry:
    """Write a new file, read it back, have the disk take it, and return its length and digest.

    Each piece is hashed while it is in the caches, and read back as soon as it is written: from the disk itself where
    the file system allows that, else from the system's memory, and then the disk takes what is there meanwhile. Raises
    OSError, and StorageError where what is read is not what was written.
    """
    digests: list[bytes] = []
    pending: deque[Future[bytes]] = deque()
    count = HANDS * at_once()
    with path.open("x+b", buffering=0) as file:
        writer, length = _Writer(path, PastCaches(path, file.fileno())), 0
        try:
            with Hands(1, "flush") as flushing, Hands(count, "piece") as hands:
                flush = _Flush(flushing, file.fileno())
                try:
                    for parts in _cut(content):
                        pending.append(hands.submit(writer.put, length, parts))
                        length += sum(map(len, parts))
                        while len(pending) > AHEAD * count:
                            digests.append(pending.popleft().result())
                        if digests and not writer.file.is_used:
                            flush.again()
                    digests += [future.result() for future in pending]
                    flush.end()
                except BaseException:
                    for future in pending:
                        future.cancel()
                    raise
        finally:
            writer.file.close()
        os.fsync(file.fileno())
    if len(digests) == 1:
        return FileEntry(length, digests[0].hex())
    return FileEntry(length, hashlib.sha256(b"".join(digests)).hexdigest(), PIECE_BYTES)


def _cut(content: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the content in pieces, each as the parts that it is made of."""
    parts: list[memoryview] = []
    held = 0
    for part in content:
        at = 0
        while at < len(part):
            parts.append(part[at : at + PIECE_BYTES - held])
            at, held = at + len(parts[-1]), held + len(parts[-1])
            if held == PIECE_BYTES:
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


@dataclass
class _Writer:
    """Puts pieces into a file; each thread has memory for one of them, and memory that is read into."""

    path: Path
    file: PastCaches
    rooms: queue.SimpleQueue[tuple[memoryview, memoryview]] = field(default_factory=queue.SimpleQueue)

    def put(self, at: int, parts: list[memoryview]) -> bytes:
        """Write a piece at its place, read it back, and return its digest."""
        room, back = self._room()
        length = 0
        for part in parts:
            room[length : length + len(part)] = part
            length += len(part)
        piece = room[:length]
        digest = hashlib.sha256(piece).digest()
        self.file.write(piece, at)
        for begin in range(0, length, READ_BACK_BYTES):
            wrote = piece[begin : begin + READ_BACK_BYTES]
            if self.file.read(back[: len(wrote)], at + begin) != len(wrote) or not _equal(wrote, back[: len(wrote)]):
                because = "what is read back is not what was written a moment ago"
                raise StorageError(
                    f"{self.path} is damaged", because, "use an earlier checkpoint, and look at this storage"
                )
        self.rooms.put((room, back))
        return digest

    def _room(self) -> tuple[memoryview, memoryview]:
        try:
            return self.rooms.get_nowait()
        except queue.Empty:
            return page_room(PIECE_BYTES), page_room(min(PIECE_BYTES, READ_BACK_BYTES))


def _equal(written: memoryview, read: memoryview) -> bool:
    """Return whether the bytes are the same, compared by words, which is four times as fast."""
    whole = len(written) - len(written) % WORD
    return np.array_equal(
        np.frombuffer(written[:whole], dtype=np.uint64), np.frombuffer(read[:whole], dtype=np.uint64)
    ) and bytes(written[whole:]) == bytes(read[whole:])
