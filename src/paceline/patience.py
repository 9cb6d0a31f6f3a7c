"""Patience: time-outs that a loaded machine does not break.

A time-out is there for what hangs. What is merely slow, because other programs want the same cores, is not hanging, so
a limit is meant in seconds of a machine with a free core for everybody: on one where twenty programs share each core, a
second of the clock counts a twentieth of a second.
"""

from __future__ import annotations

import os
import time


def programs_per_core() -> float:
    """Return how many programs want each core this process may use; 1 where cores are free, or where none can say."""
    try:
        wanting = os.getloadavg()[0]
    except OSError:
        return 1.0
    # Not on every system; where a process may use some cores only, those are the ones it shares.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1.0, wanting / (cores or 1))


class Patience:
    """A limit of so many seconds of an idle machine, from now on."""

    def __init__(self, seconds: float) -> None:
        self._left, self._looked = seconds, time.monotonic()

    def left_seconds(self) -> float:
        """Return what is left of the limit, at least 0. Look often: the load at a look counts for the time before."""
        now = time.monotonic()
        self._left -= (now - self._looked) / programs_per_core()
        self._looked = now
        return max(0.0, self._left)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.left_seconds() <= 0
