"""Worlds whose ranks are threads of the test: sums, maxima and gathers, and no process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from paceline.run.process.neighbours import ToldByRanks
from paceline.run.process.world import World

T = TypeVar("T")


class InThreads(World):
    """A rank of a world of threads, which tells what it has sent. Sums and maxima are those of the threads."""

    def meet(self, item: T) -> list[T]:
        """Return what every rank has brought, in rank order."""
        table, barrier = self.groups  # type: ignore[misc]
        table[self.rank] = item
        barrier.wait()
        found = list(table)
        barrier.wait()
        return found

    def add_up(self, vector: torch.Tensor) -> None:
        """Put the sum in the place of a vector."""
        vector.copy_(torch.stack(self.meet(vector.clone())).sum(0))

    def maximum(self, values: list[float]) -> list[float]:
        """Return the largest values."""
        return [max(each) for each in zip(*self.meet(values), strict=True)]

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums."""
        return [math.fsum(each) for each in zip(*self.meet(values), strict=True)]

    def share(self, item: Any, root: int = 0) -> Any:
        """Return one rank's item."""
        return self.meet(item)[root]

    def bring_to_first(self, item: Any) -> list[Any] | None:
        """Return every rank's item on rank 0."""
        found = self.meet(item)
        return found if self.is_first else None

    def told_at(self, node: str, item: Any, others: Sequence[str] = ()) -> dict[str, ToldByRanks]:
        """Return what ranks have brought on this rank's node and on others."""
        found = self.meet((node, item))
        return {at: [(rank, item) for rank, (where, item) in enumerate(found) if where == at]
                for at in (node, *others)}  # fmt: skip

    def gather(self, item: Any) -> list[Any]:
        """Return every rank's item."""
        return self.meet(item)


def on_threads(ranks: int, work: Callable[[World], T]) -> list[T]:
    shared: Any = ([None] * ranks, threading.Barrier(ranks))
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        found[rank] = work(InThreads(rank, ranks, rank, torch.device("cpu"), shared))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
