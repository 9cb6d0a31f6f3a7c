"""Medians and deviations that a few odd values do not move."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

NORMAL = 1.4826  # standard deviations of a normal distribution in a median absolute deviation
SMALLEST_PART = 1e-3  # of the median, that a deviation is taken to be at least: a flat curve has none
UPPER, UPPER_DEVIATIONS = 0.9, 1.2816  # a quantile, and its standard deviations above a normal distribution's mean


def middle_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of some values, and their median absolute deviation as a standard deviation."""
    ordered = sorted(values)
    middle = statistics.median(ordered)
    deviation = NORMAL * statistics.median(abs(value - middle) for value in ordered)
    return middle, max(deviation, SMALLEST_PART * abs(middle))


def middle_and_above(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of some values, and the deviation by which those above it are judged.

    Of values that lie as far above as below it is `middle_of`'s. A loss near zero often lies far above its median:
    there it is what the 0.9 quantile tells, so that a long upper side is no row of spikes.
    """
    middle, deviation = middle_of(values)
    ordered = sorted(values)
    upper = ordered[math.ceil(UPPER * len(ordered)) - 1]
    return middle, max(deviation, (upper - middle) / UPPER_DEVIATIONS)
