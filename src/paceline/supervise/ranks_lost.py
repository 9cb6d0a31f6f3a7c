"""RanksLost: what a supervisor tells at once of ranks that have died or hang, before anything is on record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RanksLost:
    """Ranks that are down: what is the matter in one line, why, and since when (seconds since the epoch)."""

    ranks: tuple[int, ...]
    what: str
    because: str
    time: float


TellLost = Callable[[RanksLost], None]


def told_to_nobody(lost: RanksLost) -> None:
    """Take what nobody wants to know."""
