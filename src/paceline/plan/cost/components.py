"""Components of a price: every plan's seconds or bytes of one kind, how these are known, and the formula in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.columns import Flags, Floats, Ints
from paceline.plan.cost.model_parts import MODES
from paceline.spec.cluster import SOURCES
from paceline.spec.forecast import Clock, Kind, Term

MEASURED, ASSUMED = SOURCES.index("measured"), SOURCES.index("assumed")  # as `Component.known` has them
# Kinds of term that err together, because one rate stands behind them; any other term is a cause of its own.
CAUSES: dict[Kind, str] = {
    "products": "products",
    "elementwise": "memory",
    "casts": "memory",
    "update": "memory",
    "host": "host",
}


@dataclass(frozen=True)
class Component:
    """One component of the price of every plan: its values, how they are known, and its formula in words.

    `known` holds places in SOURCES, for all plans or one for each. `text` is asked only for the plans that are shown.
    Seconds have the clock of a step that measures them.
    """

    name: str
    kind: Kind
    values: Floats
    known: int | Ints
    text: Callable[[int], str]
    law: str = ""
    applies: Flags | None = None  # plans that have the component at all; None: every plan
    clock: Clock = "none"

    def term(self, index: int) -> Term | None:
        """Return the component of one plan, None where the plan has none."""
        if self.applies is not None and not self.applies[index]:
            return None
        known = self.known if isinstance(self.known, int) else int(self.known[index])
        value, text = float(self.values[index]), self.text(index)
        return Term(self.name, value, text, SOURCES[known], law=self.law, kind=self.kind, clock=self.clock)


def terms_of(columns: Sequence[Component], index: int) -> tuple[Term, ...]:
    """Return the components that one plan has."""
    return tuple(term for column in columns if (term := column.term(index)) is not None)


def total(columns: Sequence[Component]) -> Floats:
    """Return the sum of the components of every plan."""
    return np.sum([column.values for column in columns], axis=0)


def without(columns: Iterable[Component], *kinds: Kind) -> list[Component]:
    """Return the components of other kinds than those named."""
    return [column for column in columns if column.kind not in kinds]


def only(columns: Iterable[Component], *kinds: Kind) -> list[Component]:
    """Return the components of the kinds named."""
    return [column for column in columns if column.kind in kinds]


def in_modes(values: Floats, *modes: str) -> Floats:
    """Return the values in the modes named and 0 in others (mode x plan x shape); of one row (mode x 1 x shape)."""
    return np.stack([np.atleast_2d(values) * (mode in modes) for mode in MODES])


def cause_seconds(terms: Iterable[tuple[str, Kind, Floats]]) -> Floats:
    """Return every plan's seconds by cause of error (plan x cause), from its terms: name, kind and seconds."""
    found: dict[str, Floats] = {}
    for name, kind, seconds in terms:
        cause = CAUSES.get(kind, name)
        found[cause] = found.get(cause, 0.0) + seconds
    return np.stack(list(found.values()), axis=1)
