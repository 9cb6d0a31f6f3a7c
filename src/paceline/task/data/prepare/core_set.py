"""Core sets: the documents that lie closest to all others, by greedy k-center over their embeddings.

The first is the one nearest to the mean of all; each next one is the one farthest from its nearest document so far
(Gonzalez, "Clustering to minimize the maximum intercluster distance", 1985; as core sets of training data: Sener and
Savarese 2018, arXiv:1708.00489). After k of them no document is farther from its nearest one than twice what the best
choice of k would leave. The order does not depend on k, so smaller sets are the beginnings of larger ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

AT_ONCE = 2**14  # points whose distances are computed at once: memory stays bounded


@dataclass(frozen=True)
class CoreSet:
    """Points in the order in which they were taken, and how far the farthest was from its nearest when each was."""

    order: npt.NDArray[np.int64]
    radii: npt.NDArray[np.float64]  # before each was taken, and after the last: one more than points were taken


def greedy_k_center(
    points: npt.NDArray[Any], count: int, progress: Callable[[float], None] = lambda share: None
) -> CoreSet:
    """Return `count` of the points [points, width]. Distances are in float64; of equally far points the first is taken.

    Takes count x points distances.
    """
    nearest = np.full(len(points), np.inf)
    mean = np.zeros(points.shape[1])
    for part in _parts(len(points)):
        mean += points[part].astype(np.float64).sum(0)
    to_mean = _squares(points, mean / len(points))
    order, radii, place = list[int](), list[float](), int(np.argmin(to_mean))
    for taken in range(min(count, len(points))):
        radii.append(float(np.sqrt(nearest[place])) if taken else float(np.sqrt(to_mean.max())))
        order.append(place)
        np.minimum(nearest, _squares(points, points[place].astype(np.float64)), out=nearest)
        nearest[place] = -1.0  # taken: never again, though others may be equal to it
        place = int(np.argmax(nearest))
        progress((taken + 1) / count)
    radii.append(float(np.sqrt(max(0.0, nearest.max()))))
    return CoreSet(np.array(order, dtype=np.int64), np.array(radii))


def _squares(points: npt.NDArray[Any], center: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the squared distance of every point from a center, as the sum of squares: no cancellation."""
    found = np.empty(len(points))
    for part in _parts(len(points)):
        off = points[part].astype(np.float64) - center
        found[part] = np.einsum("pw,pw->p", off, off)
    return found


def _parts(count: int) -> list[slice]:
    return [slice(at, at + AT_ONCE) for at in range(0, count, AT_ONCE)]
