"""A new file that is written and read back past the system's caches, where its file system has that.

What goes through the caches is copied by the kernel into memory that it must find first, which on a machine whose
memory is in use takes longer than hashing; and what is read back from there says nothing of the disk. Past them the
disk moves the bytes itself (O_DIRECT, Linux): from memory that begins at a page, in whole blocks. The rest of the last
block, and everything where the file system refuses, goes through the caches.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

LARGE_BYTES = 2**21
BLOCK_BYTES = 4096  # a multiple of what disks move at once: 512 or 4,096 bytes
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def page_room(length: int) -> memoryview:
    """Return memory of at least so many bytes that begins at a page, in whole blocks; in large pages if it is long."""
    room = mmap.mmap(-1, length + -length % BLOCK_BYTES)
    if length >= LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            room.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(room)


class Rooms:
    """Memory that begins at a page, one after the other for as many threads as there are.

    Several rooms are cut from large pages, which a disk fills twice as fast as small ones that lie anywhere; small ones
    are made one by one.
    """

    def __init__(self, length: int) -> None:
        self._length, self._free = length + -length % BLOCK_BYTES, queue.SimpleQueue[memoryview]()

    @contextlib.contextmanager
    def one(self) -> Iterator[memoryview]:
        """Lend a room."""
        room = self.take()
        yield room
        self.give(room)

    def take(self) -> memoryview:
        """Return a room that nobody has, for whoever is to `give` it back."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            room, *others = self._made()
            for other in others:
                self._free.put(other)
            return room

    def give(self, room: memoryview) -> None:
        """Take a room back."""
        self._free.put(room)

    def _made(self) -> Iterator[memoryview]:
        count = 2 * LARGE_BYTES // self._length if self._length >= LARGE_BYTES // 2 else 1
        whole = page_room(self._length * max(1, count))
        for begin in range(0, len(whole), self._length):
            yield whole[begin : begin + self._length]


def open_past_caches(path: Path, writes: bool) -> int | None:
    """Return a descriptor of a file past the caches, or None where its file system or this system has none."""
    try:
        how = os.O_RDWR if writes else os.O_RDONLY
        return os.open(path, how | os.O_DIRECT) if hasattr(os, "O_DIRECT") else None
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None


class PastCaches:
    """Writes and reads parts of an open file, for several threads. Buffers are of `page_room`, places whole blocks."""

    def __init__(self, path: Path, cached: int, writes: bool) -> None:
        self._cached, self._opened = cached, open_past_caches(path, writes)
        self._direct = self._opened

    @property
    def is_used(self) -> bool:
        """Whether the file system has refused nothing so far."""
        return self._direct is not None

    def close(self) -> None:
        """Close what was opened here."""
        if self._opened is not None:
            os.close(self._opened)
        self._opened = self._direct = None

    def write(self, content: memoryview, at: int) -> None:
        """Write all of the content at a place. Raises OSError."""
        done = self._in_blocks(lambda file, done, end: os.pwrite(file, content[done:end], at + done), len(content))
        while done < len(content):
            done += os.pwrite(self._cached, content[done:], at + done)

    def read(self, into: memoryview, at: int) -> int:
        """Read until the buffer is full or the file ends, and return how many bytes there were. Raises OSError."""
        done = self._in_blocks(lambda file, done, end: os.preadv(file, [into[done:end]], at + done), len(into))
        return done + read_into(self._cached, at + done, into[done:])

    def _in_blocks(self, move: Callable[[int, int, int], int], length: int) -> int:
        """Return how many bytes were moved past the caches: whole blocks, while the file system lets it."""
        done, whole = 0, length - length % BLOCK_BYTES
        while done < whole and (direct := self._direct) is not None:
            try:
                moved = move(direct, done, whole)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._direct = None
                break
            if not moved:
                break
            done += moved
        return done


def read_into(descriptor: int, at: int, into: memoryview) -> int:
    """Read until the buffer is full or the file ends, and return how many bytes there were."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], at + done)
        if not count:
            break
        done += count
    return done
