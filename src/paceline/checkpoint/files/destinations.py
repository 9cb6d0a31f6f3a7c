"""Where the bytes of a file go while it is read and hashed: straight into tensors, and what nobody needs nowhere."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import le
from typing import NamedTuple

import numpy as np

FEW_BYTES = 2**15  # that are copied in microseconds
MOST_ROOMS = 512  # of one call of the system, which takes 1,024 on Linux


def ignored(begin: int, end: int) -> None:
    """Take no notice."""


class Destination(NamedTuple):
    """A part of a file that goes into a place in memory.

    `came(begin, end)` is called when bytes of the room have come there and were hashed, each byte once, by any thread:
    whole rows of `row_bytes` where that can be.
    """

    begin: int
    room: memoryview
    came: Callable[[int, int], None] = ignored
    row_bytes: int = 1

    @property
    def end(self) -> int:
        """Return where the part ends in the file."""
        return self.begin + len(self.room)


class BytesInPlace(NamedTuple):
    """Bytes of a file that lie together in memory: where they lie, and from which byte on of which destination."""

    content: memoryview
    to: Destination | None = None
    at: int = 0

    def in_slices(self, length: int) -> Iterator[BytesInPlace]:
        """Yield it in slices of about so many bytes, which end where rows do."""
        begin, here = 0, len(self.content)
        row = 1 if self.to is None else self.to.row_bytes
        while here - begin > length:
            end = begin + length - (self.at + begin + length) % row
            end = min(here, end if end > begin else end + row)
            yield BytesInPlace(self.content[begin:end], self.to, self.at + begin)
            begin = end
        yield self if not begin else BytesInPlace(self.content[begin:], self.to, self.at + begin)


class Destinations:
    """The destinations of one file, whose parts lie one after the other in it."""

    def __init__(self, parts: Sequence[Destination]) -> None:
        self._parts, self._begins, self._ends = parts, [each.begin for each in parts], [each.end for each in parts]
        assert all(map(le, self._ends, self._begins[1:])), "parts in order, none within another"

    def places(self, at: int, spare: memoryview) -> list[BytesInPlace]:
        """Return where as many bytes from `at` on go as `spare` has, in order: what nobody needs goes there."""
        found: list[BytesInPlace] = []
        first, end = at, at + len(spare)
        number, count = max(0, bisect_right(self._begins, at) - 1), len(self._parts)
        while at < end:
            begins = self._begins[number] if number < count else end
            ends = self._ends[number] if number < count else end
            if number < count and ends <= at:
                number += 1
                continue
            if at < begins or number == count:
                here = min(begins, end)
                found.append(BytesInPlace(spare[at - first : here - first]))
            else:
                here, part = min(ends, end), self._parts[number]
                whole = at == begins and here == ends
                found.append(
                    BytesInPlace(part.room if whole else part.room[at - begins : here - begins], part, at - begins)
                )
            at = here
        return found


NOWHERE = Destinations([])


class Comers:
    """Tells destinations of bytes that have come, one stretch after the other: of whole rows as soon as they have."""

    def __init__(self) -> None:
        self._to: Destination | None = None
        self._begin = self._end = 0

    def add(self, stretch: BytesInPlace) -> None:
        """Take note of bytes that follow those before, or go elsewhere."""
        to = stretch.to
        if to is not self._to:
            self.tell()
            self._to, self._begin = to, stretch.at
        self._end = stretch.at + len(stretch.content)
        if to is not None and (self._end % to.row_bytes == 0 or self._end == len(to.room)):
            self.tell()

    def tell(self) -> None:
        """Tell of what has come until now."""
        if self._to is not None and self._begin < self._end:
            self._to.came(self._begin, self._end)
            self._begin = self._end


def copy_bytes(to: memoryview, of: memoryview) -> None:
    """Copy bytes; of many the interpreter is let go meanwhile, which an assignment does not do."""
    if len(of) < FEW_BYTES:
        to[:] = of
    else:
        np.copyto(np.frombuffer(to, dtype=np.uint8), np.frombuffer(of, dtype=np.uint8))


def read_spread(descriptor: int, at: int, rooms: Iterable[memoryview]) -> int:
    """Read until the rooms are full, one after the other, or the file ends; return how many bytes there were."""
    left, number, done = list(rooms), 0, 0
    while number < len(left):
        count = os.preadv(descriptor, left[number : number + MOST_ROOMS], at + done)
        if not count:
            break
        done += count
        while number < len(left) and count >= (length := len(left[number])):
            count -= length
            number += 1
        if count:
            left[number] = left[number][count:]
    return done


def cut_off(stretches: Iterable[BytesInPlace], count: int) -> Iterator[BytesInPlace]:
    """Yield the first so many bytes of stretches."""
    for each in stretches:
        yield each._replace(content=each.content[:count])
        count = max(0, count - len(each.content))
