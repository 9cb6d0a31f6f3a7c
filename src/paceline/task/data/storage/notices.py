"""What reading data has to tell and does not end a run: reads that were tried again, samples that are damaged."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LEFT_OUT = "a sample was left out"
HELD_OUT_LEFT_OUT = "a held-out sample was left out"
KEPT = 256  # different notices kept between two looks; further ones only count


class DataNotice(NamedTuple):
    """What happened, because of what, and how often."""

    what: str
    because: str
    times: int = 1


class DataNotices:
    """Counts what readers tell, from any thread, until somebody takes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._totals: Counter[str] = Counter()

    def tell(self, what: str, because: str) -> None:
        """Count one more of what happened."""
        with self._lock:
            self._totals[what] += 1
            if (what, because) in self._counts or len(self._counts) < KEPT:
                self._counts[what, because] += 1
            else:
                self._counts[what, "further ones"] += 1

    def take(self) -> list[DataNotice]:
        """Return what was told since the last call, in the order of its first time."""
        with self._lock:
            told, self._counts = self._counts, Counter()
        return [DataNotice(what, because, times) for (what, because), times in told.items()]

    def total(self, what: str) -> int:
        """Return how often something was told since the start, taken or not."""
        with self._lock:
            return self._totals[what]

    def __reduce__(self) -> tuple[object, ...]:
        return DataNotices, ()  # another process counts its own


def left_out_of(source: Any, ids: npt.NDArray[np.int64]) -> Counter[str]:
    """Return why samples of a source, or of the sources of a mixture, were left out as they were read, and how many.

    To be asked of samples that are trained on: others are read too, ahead of a stop or in the place of none.
    """
    if sources := getattr(source, "sources", ()):
        some = any(getattr(each, "damaged", None) for each in sources)
        return (
            sum((left_out_of(each, own) for each, _, own in source.apart(ids)), Counter[str]()) if some else Counter()
        )
    damaged: dict[int, str] = getattr(source, "damaged", None) or {}
    return Counter(damaged[each] for each in ids.tolist() if each in damaged) if damaged else Counter()


def notices_of(source: object) -> list[DataNotice]:
    """Return what a source, or the sources of a mixture, have told since the last call. Most have nothing to tell."""
    found = getattr(source, "notices", None)
    own = found.take() if isinstance(found, DataNotices) else []
    return [*own, *(notice for each in getattr(source, "sources", ()) for notice in notices_of(each))]
