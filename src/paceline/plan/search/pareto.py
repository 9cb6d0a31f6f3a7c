"""The Pareto front: plans that no other plan beats in everything that counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.plan.cost.columns import Floats, Ints
from paceline.plan.search.values import Values
from paceline.spec.plan import QUANTITIES

NEAR = 1.02  # within this ratio in everything, a front's plan is not told beside another
# On one cluster money is proportional to time, and carbon to energy: they tell no plans apart.
IN_ONE_CLUSTER = ("time", "memory", "energy")


def pareto_front(quantities: Floats) -> Ints:
    """Return the rows that no other row beats: at most as much in every column, and less in one.

    In rising order of the first column. Of equal rows the first is kept. `quantities` are finite (plan x quantity).
    """
    order = np.lexsort([*quantities.T[::-1]])
    rest, found = quantities[order], []
    # A row that comes later in this order never beats one before it, so the first one left is always on the front.
    while len(order):
        found.append(int(order[0]))
        kept = (rest < rest[0]).any(axis=1)
        order, rest = order[kept], rest[kept]
    return np.array(found, dtype=np.int64)


def thinned(quantities: Floats, ratio: float = NEAR) -> Ints:
    """Return a few rows, so that every row left out is within `ratio` of a returned row in every column.

    Rows that come first are kept first.
    """
    kept: list[int] = []
    for place, row in enumerate(quantities):
        if not kept or not (quantities[kept] <= row * ratio).all(axis=1).any():
            kept.append(place)
    return np.array(kept, dtype=np.int64)


def known_quantities(values: Values, among: Sequence[str] = QUANTITIES) -> tuple[str, ...]:
    """Return the quantities that are known of every plan."""
    return tuple(name for name in among if len(values) and np.isfinite(getattr(values, name)).all())


def front_of(values: Values) -> tuple[Ints, tuple[str, ...]]:
    """Return the places of a cluster's front, near ones left out, in rising order of time, and what it weighs."""
    names = known_quantities(values, IN_ONE_CLUSTER)
    if not names:
        return np.zeros(0, dtype=np.int64), names
    quantities = np.stack([getattr(values, name) for name in names], axis=1)
    whole = pareto_front(quantities)
    return whole[thinned(quantities[whole])], names
