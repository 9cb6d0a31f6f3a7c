"""A file's bytes in pieces, that several threads write, hash and read back: one core hashes more slowly than a disk.

The digest of a file in pieces is the sha256 of its pieces' sha256, 32 bytes each, one after the other. A file of one
piece has the plain sha256 of its bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from paceline.checkpoint.files.threads import Hands, at_once
from paceline.checkpoint.manifest import FileEntry
from paceline.errors import StorageError

PIECE_BYTES = 2**22
READ_BYTES = 2**18  # at a time: it stays in the cache
AHEAD = 2  # pieces for each thread that wait for it
WORD = 8


def write_in_pieces(path: Path, content: Iterable[memoryview]) -> FileEntry:
    """Write a new file, read it back, have the disk take it, and return its length and digest.

    Each piece is read back as soon as it is written, while it is still in the caches. The disk takes what is there
    meanwhile. Raises OSError, and StorageError where what is read is not what was written.
    """
    digests: list[bytes] = []
    pending: deque[Future[bytes]] = deque()
    with path.open("x+b", buffering=0) as file, Hands(1, "flush") as flushing, Hands(at_once(), "piece") as hands:
        descriptor, length = file.fileno(), 0
        flushed: Future[None] | None = None
        try:
            for piece in _cut(content):
                pending.append(hands.submit(_put, path, descriptor, length, piece))
                length += len(piece)
                while len(pending) > AHEAD * at_once():
                    digests.append(pending.popleft().result())
                if digests and (flushed is None or flushed.done()):
                    if flushed is not None:
                        flushed.result()  # the disk tells of an error once
                    flushed = flushing.submit(os.fdatasync, descriptor)
            digests += [future.result() for future in pending]
            if flushed is not None:
                flushed.result()
        except BaseException:
            for future in pending:
                future.cancel()
            raise
        os.fsync(descriptor)
    if len(digests) == 1:
        return FileEntry(length, digests[0].hex())
    return FileEntry(length, hashlib.sha256(b"".join(digests)).hexdigest(), PIECE_BYTES)


def _cut(content: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the content in pieces: what lies in one part of it as it is, the rest copied together."""
    parts: list[memoryview] = []
    held = 0
    for part in content:
        at = 0
        while at < len(part):
            parts.append(part[at : at + PIECE_BYTES - held])
            at, held = at + len(parts[-1]), held + len(parts[-1])
            if held == PIECE_BYTES:
                yield _joined(parts)
                parts, held = [], 0
    if held:
        yield _joined(parts)


def _joined(parts: list[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _put(path: Path, descriptor: int, at: int, piece: memoryview) -> bytes:
    """Write a piece at its place, read it back, and return its digest."""
    done = 0
    while done < len(piece):
        done += os.pwrite(descriptor, piece[done:], at + done)
    digest = hashlib.sha256(piece).digest()
    buffer = np.empty(READ_BYTES, dtype=np.uint8)
    for begin in range(0, len(piece), READ_BYTES):
        part = piece[begin : begin + READ_BYTES]
        if read_into(descriptor, at + begin, buffer[: len(part)].data) != len(part) or not _equal(part, buffer):
            because = "what is read back is not what was written a moment ago"
            raise StorageError(f"{path} is damaged", because, "use an earlier checkpoint, and look at this storage")
    return digest


def _equal(written: memoryview, read: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
    """Return whether the bytes are the first ones of the buffer, compared by words, which is four times as fast."""
    whole = len(written) - len(written) % WORD
    held = read[: len(written)]
    return np.array_equal(
        np.frombuffer(written[:whole], dtype=np.uint64), np.frombuffer(held[:whole].data, dtype=np.uint64)
    ) and bytes(written[whole:]) == bytes(held[whole:].data)


def read_into(descriptor: int, at: int, into: memoryview) -> int:
    """Read until the buffer is full or the file ends, and return how many bytes there were."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], at + done)
        if not count:
            break
        done += count
    return done
