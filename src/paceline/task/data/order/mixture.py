"""The order of a mixture: which source each position of the training reads, and which of its samples.

Positions lie in blocks of BLOCK. Within a block every source has a fixed count, its weight's share of the block, so
after n blocks a source of count c stands at its own position n * c, whatever its length and that of the others. Whose
a position is follows from the multiples of the golden ratio, which fall into every interval evenly however few of them
are taken (the three-distance theorem; Knuth, "The Art of Computer Programming", volume 3, section 6.4): any run of
positions, a global batch among them, holds its share of every source to within a few samples. Where weights change, or
a source comes to its limit, a new segment of blocks with other counts begins. A place in the training is thus a source
and a position of its own in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.order.of_source import Order, is_scattered
from paceline.task.data.order.permutation import keyed

BLOCK = 4096  # shares are exact to one part of it
GOLDEN_RATIO = (1 + math.sqrt(5)) / 2
OF_MIXTURE = 0x2545F4914F6CDD1D  # sets the keys of a mixture's blocks apart from those of epochs

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MixShare:
    """What one source has of a mixture: its weight, other ones from positions of the mixture on, and its limit."""

    samples: int
    weight: float
    changes: tuple[tuple[int, float], ...] = ()
    most: int | None = None  # samples it gives at most

    def weight_at(self, position: int) -> float:
        """Return the weight that holds from a position on."""
        return next((weight for at, weight in reversed(self.changes) if at <= position), self.weight)


@dataclass(frozen=True)
class _Segment:
    """Blocks of equal counts. `before` counts what each source has given before the first of them."""

    first_block: int
    counts: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many positions a block of it has."""
        return sum(self.counts)

    def places(self, begin: int, blocks: Ints, inside: Ints) -> tuple[Ints, Ints]:
        """Return (source, position of its own) of places inside of blocks. `begin` is where drawing begins."""
        source, own, counts = _whose(self.counts, self.before)
        drawn = inside * _stride(self.size)
        drawn += begin
        drawn %= self.size
        found = (blocks - self.first_block) * counts[drawn]
        found += own[drawn]
        return source[drawn], found


class MixtureOrder:
    """The ids of a mixture's samples along the training. Ids count through the sources, one after the other."""

    def __init__(self, shares: Sequence[MixShare], orders: Sequence[Order]) -> None:
        """`orders` are those of the sources, in the order of `shares`. Raises DataError where nothing is to be read."""
        self.shares, self._orders = tuple(shares), tuple(orders)
        self._offsets = np.cumsum([0, *(share.samples for share in shares)])[:-1]
        self._segments, self.end = _segments(self.shares)
        if not self._segments:
            raise DataError("the mixture begins with nothing", "every source's weight is 0", "a weight above 0")
        self.is_scattered = any(map(is_scattered, self._orders))
        self._firsts = np.array([segment.first_block for segment in self._segments], dtype=np.int64)

    def ids(self, seed: int, positions: npt.NDArray[np.int64]) -> Ints:
        """Return the sample at each position. Raises DataError past the end of all sources, where there is one."""
        which, own = self.places(seed, positions)
        found = np.empty(which.shape, dtype=np.int64)
        for source, order in enumerate(self._orders):
            if len(here := np.flatnonzero(which == source)):
                # Sources of one length have orders of their own.
                of_source = int(keyed(seed, np.array([source + 1], dtype=np.uint64) ^ np.uint64(OF_MIXTURE))[0])
                found.reshape(-1)[here] = self._offsets[source] + order.ids(of_source, own.reshape(-1)[here])
        return found

    def places(self, seed: int, positions: npt.NDArray[np.int64]) -> tuple[Ints, Ints]:
        """Return (source, position of its own) of each position: nothing of it depends on how long sources are.

        Limits in epochs excepted, which follow the length of their source. Within a block a source's own positions come
        in no order; after it each up to its count was there once.
        """
        flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
        if flat.size and int(flat.min()) < 0:
            raise ValueError(f"positions count from 0, not {int(flat.min())}")
        if self.end is not None and flat.size and int(flat.max()) >= self.end:
            raise past_end(self.end)
        blocks, inside = np.divmod(flat, BLOCK)
        segments = np.searchsorted(self._firsts, blocks, side="right") - 1
        which, own = np.empty(flat.size, dtype=np.int64), np.empty(flat.size, dtype=np.int64)
        for number in set(segments.tolist()) if len(self._segments) > 1 else {0}:
            here = np.flatnonzero(segments == number)
            segment = self._segments[number]
            begin = int(keyed(seed ^ OF_MIXTURE, np.array([number], dtype=np.uint64))[0]) % segment.size
            which[here], own[here] = segment.places(begin, blocks[here], inside[here])
        return which.reshape(np.shape(positions)), own.reshape(np.shape(positions))

    def given(self, seed: int, position: int) -> list[int]:
        """Return how many samples each source has given before a position."""
        block, inside = divmod(position, BLOCK)
        segment = self._segments[int(np.searchsorted(self._firsts, block, side="right")) - 1]
        passed = block - segment.first_block
        found = [before + passed * count for before, count in zip(segment.before, segment.counts, strict=True)]
        if inside:
            which, _ = self.places(seed, np.arange(block * BLOCK, position))
            for source, count in enumerate(np.bincount(which, minlength=len(found)).tolist()):
                found[source] += count
        return found


@lru_cache(maxsize=8)
def _whose(given: tuple[int, ...], before: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """Return of each number that a position of a segment draws its source, its place in that, and the source's count.

    Places are those of a segment's first block.
    """
    counts = np.array(given, dtype=np.int64)
    source = np.repeat(np.arange(len(counts)), counts)
    own = np.arange(len(source)) + (np.array(before, dtype=np.int64) - np.cumsum(counts) + counts)[source]
    return source, own, counts[source]


def past_end(end: int) -> DataError:
    """Return the error of asking for samples past the end of a mixture."""
    return DataError(
        f"the mixture ends after {end:,} samples",
        "every source that still had a weight was read as often as its limit allows",
        "a later limit, a source without one, or an earlier task.stop",
    )


def _stride(size: int) -> int:
    """Return the whole number nearest below size / golden ratio that shares no divisor with size."""
    stride = max(1, round(size / GOLDEN_RATIO))
    while math.gcd(stride, size) != 1:
        stride -= 1
    return stride


def _segments(shares: Sequence[MixShare]) -> tuple[list[_Segment], int | None]:
    """Return the segments of a mixture, and the position at which all sources have come to their limits, or None."""
    turns = sorted({-(-at // BLOCK) for share in shares for at, _ in share.changes})
    block, used, found = 0, [0] * len(shares), list[_Segment]()
    while True:
        following = next((turn for turn in turns if turn > block), None)
        left = [None if share.most is None else share.most - gone for share, gone in zip(shares, used, strict=True)]
        weights = [
            share.weight_at(block * BLOCK) if room != 0 else 0.0 for share, room in zip(shares, left, strict=True)
        ]
        counts = _counts(weights, left)
        length = None if following is None else following - block
        for count, room in zip(counts, left, strict=True):
            if room is not None and count:
                length = min(room // count, length or room // count)
        if not sum(counts):
            return found, block * BLOCK
        found.append(_Segment(block, tuple(counts), tuple(used)))
        if sum(counts) < BLOCK:  # the sources that are left do not fill another block
            return found, block * BLOCK + sum(counts)
        if length is None:
            return found, None
        block += length
        used = [gone + length * count for gone, count in zip(used, counts, strict=True)]


def _counts(weights: Sequence[float], left: Sequence[int | None]) -> list[int]:
    """Return how many of a block's positions each source has: its weight's share, and no more than it has left."""
    counts = [0] * len(weights)
    open_ = [number for number, weight in enumerate(weights) if weight > 0]
    to_give = BLOCK
    while open_ and to_give:
        shares = _apportioned([weights[number] for number in open_], to_give)
        over = [number for number, share in zip(open_, shares, strict=True) if _room(left[number]) < share]
        if not over:
            for number, share in zip(open_, shares, strict=True):
                counts[number] = share
            return counts
        for number in over:  # it gives what it has, and the others share the rest
            counts[number] = int(_room(left[number]))
            to_give -= counts[number]
            open_.remove(number)
    return counts


def _room(left: int | None) -> float:
    return float("inf") if left is None else left


def _apportioned(weights: Sequence[float], places: int) -> list[int]:
    """Return whole numbers in proportion to weights that add up to `places`, by the largest remainder.

    A weight above 0 has one place at least, where there are enough.
    """
    total = sum(weights)
    exact = [weight / total * places for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda number: (whole[number] - exact[number], number))
    for number in by_remainder[: places - sum(whole)]:
        whole[number] += 1
    for number in range(len(whole)):
        if not whole[number] and max(whole) > 1:
            whole[whole.index(max(whole))] -= 1
            whole[number] = 1
    return whole
