"""What a user's modules find as they are imported is alike in all processes, and so is what they leave behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from paceline.run.process.world import World

WORD = "paceline"
HASHES_DIFFER = (
    "hashes of words differ among ranks (PYTHONHASHSEED is not the same): where code of yours goes through a set, its"
    " order is another on each rank. The proof, whose ranks have hashes alike, does not see it: export PYTHONHASHSEED=0"
)


def begin_alike() -> None:
    """Have the global generators of Python and numpy begin as on all other ranks, and in every start; torch's do.

    A module may draw as it is imported: which features it leaves out, say. Called before the user's modules are.
    """
    random.seed(0)
    np.random.seed(0)


def hashes_differ(world: World) -> list[str]:
    """Return what is said where ranks that a launcher has started hash otherwise. Every rank calls it."""
    own = float(hash(WORD) % 2**48)
    most, least = world.maximum([own, -own])
    return [] if most == -least else [HASHES_DIFFER]
