"""How numbers are spread over ranks: the least, the middle and the most of them, exactly, by sums and maxima alone.

In a world of more than FEW ranks a rank sends as much as in one of many thousand. The middle one of N numbers is found
digit by digit: ranks count which of 256 digits their numbers have next, eight times for the 64 bits of a number. Of 1,
1.5 and 9 the first two begin alike: the first count says that the middle one is among them, the second which it is. In
a small world every rank sends its numbers to all.

FEW is where the one has as many messages behind each other as the other. A gather of objects goes twice around a ring
of N ranks, 2 (N - 1) messages; a sum goes up a tree and down again, 2 log2 N, and ten sums and maxima are taken. At 64
ranks these are 126 and 120. gloo sums around rings too: at 2 to 64 ranks a gather is the faster one there
(`benchmarks/scale.py` has both). In bytes a gather of 20 numbers reaches what their sums send at some 1,700 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.run.process.world import World
from paceline.spec.journal.rank_spread import RankSpread

FEW = 64  # ranks, up to which their numbers are gathered
DIGITS, DIGIT_BITS, NUMBER_BITS = 256, 8, 64
SIGN = np.uint64(1 << 63)


@dataclass(frozen=True)
class OverRanks(RankSpread):
    """The spread of one number of each of `count` ranks, with those around position `count // 2` of them, sorted.

    `before` and `after` are the neighbours of `middle`; where there is none, infinite ones.
    """

    count: int
    before: float
    middle: float
    after: float

    @classmethod
    def of(cls, count: int, rank: int, *numbers: float) -> OverRanks:
        """Return the spread of the least number, the middle one between its neighbours, and the most, in order.

        The median is that of `statistics.median`.
        """
        least, before, middle, after, most = map(float, numbers)
        median = middle if count % 2 else (before + middle) / 2
        return cls(least, median, most, rank, count, before, middle, after)

    def median_without(self, own: float) -> float:
        """Return the median of the others' numbers, for a rank whose own is one of at least two."""
        assert self.count > 1
        if self.count % 2 == 0:
            return self.middle if own <= self.before else self.before
        if own == self.middle:
            return (self.before + self.after) / 2
        return (self.middle + self.after) / 2 if own < self.middle else (self.before + self.middle) / 2


def spread_over(world: World, own: Sequence[float | None], few: int = FEW) -> list[OverRanks | None]:
    """Return how each number is spread over the ranks that have it; None where none has. Every rank calls it alike.

    `own` are this rank's finite numbers, None for one that this rank does not have. Up to `few` ranks gather
    them.
    """
    if not own:
        return []
    if world.size <= few:
        return [spread_of_numbers(column) for column in zip(*world.gather(list(own)), strict=True)]
    has = np.array([value is not None for value in own])
    values = np.array([0.0 if value is None else value for value in own]) + 0.0  # there is one zero
    counts, middles, below = _middles(world, values, has)
    absent = np.full(len(values), -np.inf)
    lower, higher = has & (values < middles), has & (values > middles)
    mostly = [np.where(has, values, absent), np.where(has, -values, absent),
              np.where(lower, values, absent), np.where(higher, -values, absent)]  # fmt: skip
    found = np.array(world.maximum(np.concatenate(mostly).tolist())).reshape(4, -1)
    most, least, under, over = found[0], -found[1], found[2], -found[3]
    first = world.maximum(np.where(has & (values == most), -float(world.rank), absent).tolist())
    spreads: list[OverRanks | None] = []
    for at, count in enumerate(counts):
        if not count:
            spreads.append(None)
            continue
        fewer, up_to = below[at]
        before = under[at] if fewer == count // 2 else middles[at]
        after = over[at] if up_to == count // 2 + 1 else middles[at]
        spreads.append(OverRanks.of(int(count), int(-first[at]), least[at], before, middles[at], after, most[at]))
    return spreads


def spread_of_numbers(numbers: Sequence[float | None]) -> OverRanks | None:
    """Return how the numbers of ranks, in rank order, are spread over those that have one; None where none has."""
    known = sorted(each for each in numbers if each is not None)
    if not known:
        return None
    at = len(known) // 2
    before, after = known[at - 1] if at else -math.inf, known[at + 1] if at + 1 < len(known) else math.inf
    return OverRanks.of(len(known), numbers.index(known[-1]), known[0], before, known[at], after, known[-1])


def _middles(
    world: World, values: NDArray[np.float64], has: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Return of each number how many ranks have it, the one at position count // 2, and how many are less, or no more.

    The last has a row of two for each number.
    """
    keys, size = _keys(values), len(values)
    known = np.zeros(size, dtype=np.uint64)  # the first digits of the middle one
    fits = has.copy()  # whether this rank's number begins so
    fewer = np.zeros(size, dtype=np.int64)
    ranks = equal = np.zeros(size, dtype=np.int64)
    for shift in range(NUMBER_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        digits = ((keys >> np.uint64(shift)) & np.uint64(DIGITS - 1)).astype(np.int64)
        counted = np.zeros((size, DIGITS))
        counted[np.arange(size), digits] = fits
        vector = torch.from_numpy(counted.reshape(-1)).to(world.device)
        world.add_up(vector)
        in_all = vector.cpu().numpy().reshape(size, DIGITS).astype(np.int64)
        up_to = in_all.cumsum(axis=1)
        if shift == NUMBER_BITS - DIGIT_BITS:
            ranks = up_to[:, -1]
        next_digit = np.argmax(up_to > (ranks // 2 - fewer)[:, None], axis=1)
        equal = in_all[np.arange(size), next_digit]
        fewer = fewer + up_to[np.arange(size), next_digit] - equal
        known |= next_digit.astype(np.uint64) << np.uint64(shift)
        fits &= digits == next_digit
    return ranks, _numbers(known), np.stack([fewer, fewer + equal], axis=1)


def _keys(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return integers that are in the order of the numbers."""
    bits = values.view(np.uint64)
    return np.where(bits & SIGN, ~bits, bits | SIGN)


def _numbers(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the numbers of keys."""
    return np.where(keys & SIGN, keys & ~SIGN, ~keys).view(np.float64)
