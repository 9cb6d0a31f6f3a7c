"""Which rank writes what in a save: worked out on the first rank from what all hold, and kept while they hold that.

Making a plan takes that rank time and memory for every part of every rank. Until a rank holds other parts, a save needs
no more of the others than sums: the plan says which copy of a part counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from paceline.checkpoint.index import TensorKind
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.shards import DTYPES
from paceline.checkpoint.snapshot import Part, Snapshot
from paceline.checkpoint.spread import PartAt, kinds_of, spread

WORD = 2**64


@dataclass(frozen=True)
class SavePlan:
    """What this rank does with each of its parts, in their order; `kinds` and `bytes` of all tensors are rank 0's."""

    size: int  # of the world
    parts: tuple[Part, ...]  # without fingerprints: the plan holds as long as they are these
    names: list[str]  # of all tensors
    writers: list[int]  # the rank that writes the part, -1 for one that is not written at all
    shares: list[int]  # of the copies' balance, see `fingerprints`
    kinds: dict[str, TensorKind] = field(default_factory=dict)
    bytes: int = 0

    def fingerprints(self, taken: Snapshot, ranks: Ranks) -> dict[str, str]:
        """Return the fingerprints of the whole tensors, empty where copies differ. Every rank calls it.

        Those that are written add up to the fingerprint. In a second sum a copy counts by a number of its rank's own,
        and the one that is written by minus the sum of its copies' numbers: it is zero where they are equal.
        """
        place = {name: number for number, name in enumerate(self.names)}
        sums, balances = [0] * len(place), [0] * len(place)
        for part, writer, share in zip(taken.values, self.writers, self.shares, strict=True):
            if writer >= 0 and part.fingerprint is not None:
                sums[place[part.name]] += part.fingerprint if writer == ranks.rank else 0
                balances[place[part.name]] += part.fingerprint * share
        totals = ranks.total([number % WORD for number in (*sums, *balances)])
        pairs = zip(self.names, totals, totals[len(place) :], strict=False)
        return {name: "" if balance else f"{total:016x}" for name, total, balance in pairs}


@dataclass
class KeptPlan:
    """The plan of the last save, if there was one. It belongs to one training: its saves take turns."""

    plan: SavePlan | None = None

    def for_save(self, what: str, taken: Snapshot, ranks: Ranks) -> SavePlan:
        """Return the plan of a save, made anew where any rank holds other parts than last time. Every rank calls it."""
        parts = tuple(replace(part, fingerprint=None) for part in taken.values)
        known = self.plan
        if not ranks.any_of([known is None or (known.size, known.parts) != (ranks.size, parts)])[0]:
            assert known is not None
            return known
        kinds: dict[str, TensorKind] = {}
        rows = ranks.settle(what, lambda: parts, partial(_rows, kinds))
        names = ranks.from_first(what, lambda: list(kinds))
        size = sum(math.prod(kind.shape) * DTYPES[kind.dtype][1] for kind in kinds.values())
        self.plan = SavePlan(ranks.size, parts, names, *rows, kinds, size)
        return self.plan


def _rows(kinds: dict[str, TensorKind], of_ranks: Sequence[Sequence[Part]]) -> list[tuple[list[int], list[int]]]:
    """Return (writers, shares) of each rank's parts, and fill in what the tensors are. Called on rank 0."""
    writers = spread(of_ranks)
    kinds.update(kinds_of(of_ranks))
    owed: dict[PartAt, int] = {}
    for rank, parts in enumerate(of_ranks):
        for part in parts:
            place = part.name, part.box
            owed[place] = owed.get(place, 0) - (_number(rank) if writers.get(place) != rank else 0)
    return [
        (
            [writers.get((part.name, part.box), -1) for part in parts],
            [owed[place] if writers.get(place := (part.name, part.box)) == rank else _number(rank) for part in parts],
        )
        for rank, parts in enumerate(of_ranks)
    ]


def _number(rank: int) -> int:
    """Return an odd number of a rank's own, so that what two copies are off by does not cancel."""
    return (rank + 1) * 0x9E3779B97F4A7C15 % WORD | 1
