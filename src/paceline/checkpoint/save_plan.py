"""Which rank writes what in a save: agreed on by the ranks that hold it, and kept while they hold that.

Each rank learns of its own parts who else holds them (writers/choose.py). Only where what would be written does not
make every tensor whole, or ranks disagree about one, the first rank looks at every part of all, and says what is wrong.
Until a rank holds other parts, a save needs no more of the others than sums: the plan says which copy of a part counts.
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
from paceline.checkpoint.writers.choose import WriterChoice, choose_writers, cover_of, number_of
from paceline.checkpoint.writers.spread import PartAt, kinds_of, spread
from paceline.checkpoint.writers.talk import WORD


@dataclass(frozen=True)
class SavePlan:
    """What this rank does with each of its parts, in their order; `kinds` and `bytes` of all tensors are rank 0's."""

    size: int  # of the world
    parts: tuple[Part, ...]  # without fingerprints: the next save has the same plan as long as it has these parts
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
        choice = ranks.hold_talk(choose_writers(parts, ranks.rank, ranks.size))
        names = ranks.from_first(what, lambda: list(choice.kinds))
        covers = ranks.total(_covers(parts, choice, names, ranks.rank))
        if not ranks.from_first(what, lambda: _is_whole(choice, names, covers)):
            kinds: dict[str, TensorKind] = {}
            writers, shares = ranks.settle(what, lambda: parts, partial(rows_of, kinds))
            choice = WriterChoice(writers, shares, kinds)
        size = sum(math.prod(kind.shape) * DTYPES[kind.dtype][1] for kind in choice.kinds.values())
        kinds = choice.kinds if ranks.rank == 0 else {}
        self.plan = SavePlan(ranks.size, parts, names, choice.writers, choice.shares, kinds, size)
        return self.plan


def _covers(parts: Sequence[Part], choice: WriterChoice, names: Sequence[str], rank: int) -> list[int]:
    """Return for each tensor the weight of what this rank writes of it."""
    sums = dict.fromkeys(names, 0)
    for part, writer in zip(parts, choice.writers, strict=True):
        sums[part.name] += cover_of(part.box) if writer == rank else 0
    return [number % WORD for number in sums.values()]


def _is_whole(choice: WriterChoice, names: Sequence[str], covers: Sequence[int]) -> bool:
    """Return whether what all ranks write covers every tensor once, and they agree what it is. Called on rank 0."""
    wholes = [cover_of(((0,) * len(shape), shape)) for shape in (choice.kinds[name].shape for name in names)]
    return not choice.torn and list(covers) == wholes


def rows_of(kinds: dict[str, TensorKind], of_ranks: Sequence[Sequence[Part]]) -> list[tuple[list[int], list[int]]]:
    """Return (writers, shares) of each rank's parts, and fill in what the tensors are, from those of all.

    Raises StorageError where they do not make the tensors whole. Called on rank 0.
    """
    writers = spread(of_ranks)
    kinds.update(kinds_of(of_ranks))
    owed: dict[PartAt, int] = {}
    for rank, parts in enumerate(of_ranks):
        for part in parts:
            place = part.name, part.box
            owed[place] = owed.get(place, 0) - (number_of(rank) if writers.get(place) != rank else 0)
    return [
        (
            [writers.get((part.name, part.box), -1) for part in parts],
            [owed[place] if writers.get(place := (part.name, part.box)) == rank else number_of(rank) for part in parts],
        )
        for rank, parts in enumerate(of_ranks)
    ]
