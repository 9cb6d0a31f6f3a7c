"""Groups of a proof's ranks that are at work at a time: which jobs a group does, and which group does the next job."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

JOBS_PER_FORK = 6
LANES = 2  # groups that are at work at a time, where there are cores for them
NUMBER_BYTES = 4


def lanes_here(jobs: int) -> int:
    """Return how many groups of ranks are at work at a time on this machine, for so many jobs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(LANES, cores, jobs))


def in_groups(ranks: Sequence[int], lanes: int) -> list[list[int]]:
    """Return the places of the jobs that the same forked ranks do: a few, of one number of ranks.

    `ranks` are those of each job.
    """
    found: list[list[int]] = []
    for _, alike in itertools.groupby(range(len(ranks)), key=ranks.__getitem__):
        places = list(alike)
        each = min(JOBS_PER_FORK, -(-len(places) // lanes))
        found += [places[at : at + each] for at in range(0, len(places), each)]
    return found


@contextlib.contextmanager
def handed_out(count: int) -> Iterator[Callable[[], int | None]]:
    """Give what returns the numbers below `count`, each once in all processes that are forked within it, then None."""
    reads, writes = os.pipe()
    os.write(writes, b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in range(count)))
    os.close(writes)

    def following() -> int | None:
        told = os.read(reads, NUMBER_BYTES)
        return int.from_bytes(told, "little") if told else None

    try:
        yield following
    finally:
        os.close(reads)
