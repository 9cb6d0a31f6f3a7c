"""A node's lookout: what its supervisor sees of its ranks of a world, and what of that the coordinator is told.

Told is what has changed: a world that does well is silent, and what a node says has the same size however many ranks
are there. More is told where the coordinator asks for it, since a rank somewhere tells nothing for too long.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import replace

from paceline.patience import programs_per_core
from paceline.supervise.pulses.sight import LONGEST_LOOK_SECONDS, LOOK_SECONDS, Sight
from paceline.supervise.pulses.silences import Overview


class Scrutiny(enum.Enum):
    """How much a node tells of its ranks."""

    OVERVIEW = "overview"  # how many there are, and whether one is late
    LAST = "last"  # and how far the last of them is
    EACH = "each"  # and how each of them does


class Lookout:
    """What a node tells of its ranks."""

    def __init__(self, sight: Sight, ranks: Collection[int]) -> None:
        """`ranks` are those of the node, which may change: their coming is told once all of them are there."""
        self._sight, self._ranks = sight, ranks
        self._scrutiny, self._load = Scrutiny.OVERVIEW, 1.0
        self._told: dict[str, object] = {"overview": Overview().told(), "load": 1.0}  # what is taken of a silent node
        self._asked: dict[int, str] = {}  # what ranks that were asked for their stacks had written before
        self._looked, self._is_due = -float("inf"), True

    def attend(self, scrutiny: str, load: float) -> None:
        """Tell so much from now on; `load` is how many programs want each core of the node that is loaded most."""
        self._scrutiny, self._load, self._is_due = Scrutiny(scrutiny), load, True

    def ask(self, ranks: Collection[int], by_signal: bool) -> None:
        """Have ranks write their stacks."""
        self._asked |= {rank: self._sight.stack(rank) for rank in ranks}
        self._sight.ask(ranks, by_signal)

    def news(self, ended: Collection[int], now: float) -> list[dict[str, object]]:
        """Return what the coordinator is to be told now of the ranks that have not ended."""
        if not self._is_due and now - self._looked < LOOK_SECONDS:
            return []
        load = programs_per_core()
        passed = min(now - self._looked, LONGEST_LOOK_SECONDS) / max(load, self._load)
        self._looked, self._is_due = now, False
        overview = self._sight.overview(ended, passed, now)
        if self._scrutiny is Scrutiny.OVERVIEW and not overview.is_late:
            are_all_there = overview.ranks >= len(set(self._ranks).difference(ended))
            overview = replace(overview, last=None) if are_all_there else Overview()
        told = {"overview": overview.told(), "load": round(load, 1)}
        messages = [told] if told != self._told else []
        self._told = told
        if self._scrutiny is Scrutiny.EACH:
            messages.append({"seen": [seen.told(now) for seen in self._sight.closely().values()]})
        for rank, before in list(self._asked.items()):
            text = self._sight.stack(rank)
            if text != before:
                self._asked[rank] = text
                messages.append({"stack": text, "rank": rank})
        return messages
