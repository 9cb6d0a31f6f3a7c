"""Where the bytes of a file go while it is read and hashed: straight into tensors, and what nobody needs nowhere."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

FEW_BYTES = 2**15  # that are copied in microseconds
MOST_ROOMS = 512  # of one call of the system, which takes 1,024 on Linux


def ignored(begin: int, end: int) -> None:
    """Take no notice."""


@dataclass(frozen=True)
class Destination:
    """A part of a file that goes into a place in memory.

    `came(begin, end)` is called when bytes of the room have come there and were hashed, each byte once, by any thread.
    """

    begin: int
    room: memoryview
    came: Callable[[int, int], None] = ignored

    @property
    def end(self) -> int:
        """Return where the part ends in the file."""
        return self.begin + len(self.room)


class BytesInPlace(NamedTuple):
    """Bytes of a file that lie together in memory: where they lie, and from which byte on of which destination."""

    content: memoryview
    to: Destination | None = None
    at: int = 0


class Destinations:
    """The destinations of one file, whose parts lie one after the other in it."""

    def __init__(self, parts: Sequence[Destination]) -> None:
        assert all(one.end <= other.begin for one, other in pairwise(parts)), "parts in order, none within another"
        self._parts = parts
        self._begins = [part.begin for part in self._parts]

    def places(self, at: int, spare: memoryview) -> list[BytesInPlace]:
        """Return where as many bytes from `at` on go as `spare` has, in order: what nobody needs goes there."""
        found: list[BytesInPlace] = []
        first, end = at, at + len(spare)
        number = max(0, bisect_right(self._begins, at) - 1)
        while at < end:
            part = self._parts[number] if number < len(self._parts) else None
            if part is not None and part.end <= at:
                number += 1
                continue
            begin = end if part is None else min(part.begin, end)
            if part is None or at < begin:
                found.append(BytesInPlace(spare[at - first : begin - first]))
            else:
                found.append(BytesInPlace(part.room[at - part.begin : end - part.begin], part, at - part.begin))
            at += len(found[-1].content)
        return found


NOWHERE = Destinations([])


def tell(came: Iterable[BytesInPlace]) -> None:
    """Tell destinations that bytes have come, which follow each other: of one destination all at once."""
    for _, group in groupby(came, key=lambda stretch: id(stretch.to)):
        stretches = list(group)
        if (to := stretches[0].to) is not None:
            to.came(stretches[0].at, stretches[-1].at + len(stretches[-1].content))


def copy_bytes(to: memoryview, of: memoryview) -> None:
    """Copy bytes; of many the interpreter is let go meanwhile, which an assignment does not do."""
    if len(of) < FEW_BYTES:
        to[:] = of
    else:
        np.copyto(np.frombuffer(to, dtype=np.uint8), np.frombuffer(of, dtype=np.uint8))


def read_spread(descriptor: int, at: int, rooms: Iterable[memoryview]) -> int:
    """Read until the rooms are full, one after the other, or the file ends; return how many bytes there were."""
    left, done = deque(rooms), 0
    while left:
        count = os.preadv(descriptor, [left[number] for number in range(min(MOST_ROOMS, len(left)))], at + done)
        if not count:
            break
        done += count
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]
    return done


def cut_off(stretches: Iterable[BytesInPlace], count: int) -> Iterator[BytesInPlace]:
    """Yield the first so many bytes of stretches."""
    for each in stretches:
        yield each._replace(content=each.content[:count])
        count = max(0, count - len(each.content))
