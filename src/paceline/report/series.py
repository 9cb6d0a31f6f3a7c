"""Curves small enough to draw: thinned so that no peak and no valley is lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POINTS = 1200
TREND_BUCKETS = 100


@dataclass(frozen=True)
class Series:
    """A curve over steps: at most POINTS points out of `total`; `missing` of them had no finite value."""

    points: tuple[tuple[float, float], ...]
    total: int = 0
    missing: int = 0


def thin(x: NDArray[np.float64], y: NDArray[np.float64], limit: int = POINTS) -> Series:
    """Return at most `limit` of the points, keeping the first, the last and each bucket's minimum and maximum."""
    finite = np.isfinite(x) & np.isfinite(y)
    missing = int(len(x) - finite.sum())
    x, y = x[finite], y[finite]
    if len(x) > limit:
        keep = {0, len(x) - 1}
        for bucket in np.array_split(np.arange(len(x)), max(1, (limit - 2) // 2)):
            keep.add(int(bucket[np.argmin(y[bucket])]))
            keep.add(int(bucket[np.argmax(y[bucket])]))
        chosen = sorted(keep)
        x, y = x[chosen], y[chosen]
    points = tuple(zip(x.tolist(), (float(f"{value:.6g}") for value in y.tolist()), strict=True))
    return Series(points, int(finite.sum()) + missing, missing)


def trend(x: NDArray[np.float64], y: NDArray[np.float64], buckets: int = TREND_BUCKETS) -> Series:
    """Return the mean of each of `buckets` equal stretches; empty where there are too few points to smooth."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) < 3 * buckets:
        return Series(())
    means = [np.array([part.mean() for part in np.array_split(column, buckets)]) for column in (x, y)]
    return thin(means[0], means[1])
