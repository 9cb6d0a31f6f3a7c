"""Medians and deviations that a few odd values do not move."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

NORMAL = 1.4826  # standard deviations of a normal distribution in a median absolute deviation
SMALLEST_PART = 1e-3  # of the median, that a deviation is taken to be at least: a flat curve has none
UPPER = 0.9  # a quantile, and how many standard deviations above the mean a normal distribution has it
UPPER_DEVIATIONS = 1.2815515655446004


def median_of(ordered: Sequence[float]) -> float:
    """Return the median of values in their order."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def upper_of(ordered: Sequence[float]) -> float:
    """Return the 0.9 quantile of values in their order."""
    return ordered[math.ceil(UPPER * len(ordered)) - 1]


def deviation_of(ordered: Sequence[float], middle: float) -> float:
    """Return the median absolute deviation of ordered values from `middle`, their median, as a standard deviation."""
    deviation = NORMAL * median_of(sorted([abs(value - middle) for value in ordered]))
    return max(deviation, SMALLEST_PART * abs(middle))


def middle_and_above(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of some values, and the deviation by which those above it are judged.

    Of values that lie as far above as below it is `deviation_of`'s. A loss near zero often lies far above its median:
    there it is what the 0.9 quantile tells, so that a long upper side is no row of spikes.
    """
    ordered = sorted(values)
    middle = median_of(ordered)
    return middle, max(deviation_of(ordered, middle), (upper_of(ordered) - middle) / UPPER_DEVIATIONS)


class OrderedWindow:
    """The last so many values, in their order too: a further one costs little however long the window is."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._values: deque[float] = deque()
        self.ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> float | None:
        """Take a value, and return the one that has left for it."""
        left = None
        if len(self._values) == self._length:
            left = self._values.popleft()
            del self.ordered[bisect_left(self.ordered, left)]
        self._values.append(value)
        insort(self.ordered, value)
        return left
