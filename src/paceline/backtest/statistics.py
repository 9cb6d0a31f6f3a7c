"""The few statistics of a backtest, on plain lists. NaN of nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.robust import median_of


def mean(values: Iterable[float]) -> float:
    """Return the mean."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def median(values: Iterable[float]) -> float:
    """Return the median."""
    ordered = sorted(values)
    return median_of(ordered) if ordered else math.nan


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value from 1, the mean rank among equals."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            found[place] = (start + end) / 2 + 1
        start = end + 1
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the rank correlation, with mean ranks among equals; NaN where one side does not vary."""
    first, second = ranks(left), ranks(right)
    first_mean, second_mean = mean(first), mean(second)
    product = math.fsum((a - first_mean) * (b - second_mean) for a, b in zip(first, second, strict=True))
    spread = math.fsum((a - first_mean) ** 2 for a in first) * math.fsum((b - second_mean) ** 2 for b in second)
    return product / math.sqrt(spread) if spread > 0 else math.nan
