"""What the ranks of a node tell each other, in the store of their world; the cost does not grow with the world."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch.distributed as dist

ToldByRanks = list[tuple[int, Mapping[str, int | str]]]  # (rank, what it told), by rank


class Neighbours:
    """What ranks have left by node in the store that their process group was made with.

    `name` is this round's alone. The store, which rank 0 or the supervisor holds, keeps what was told until the round
    is over.
    """

    def __init__(self, name: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._name = f"neighbours/{name}"
        self._own = ""  # the key under which this rank has told something

    def tell(self, node: str, rank: int, item: Mapping[str, int | str]) -> None:
        """Leave a rank's item at its node."""
        key = f"{self._name}/{node}"
        self._own = f"{key}/{self._store.add(key, 1)}"
        self._store.set(self._own, json.dumps([rank, dict(item)]))

    def told(self, node: str) -> ToldByRanks:
        """Return what the ranks of a node have left. All of them have done so before."""
        key = f"{self._name}/{node}"
        texts = [self._store.get(f"{key}/{number}") for number in range(1, self._store.add(key, 0) + 1)]
        return sorted(((rank, item) for rank, item in map(json.loads, texts)), key=lambda told: told[0])

    def forget(self, nodes: Sequence[str]) -> None:
        """Take back what this rank has told, and the counts of nodes. All ranks have read what they want to know."""
        for key in (self._own, *(f"{self._name}/{node}" for node in nodes)):
            self._store.delete_key(key)


def told_alone(node: str, item: Mapping[str, int | str], others: Sequence[str]) -> dict[str, ToldByRanks]:
    """Return what one rank in a world of its own is told."""
    return {name: [(0, item)] if name == node else [] for name in (node, *others)}
