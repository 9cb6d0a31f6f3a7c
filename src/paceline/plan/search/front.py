"""The Pareto front of a search: its plans in words, and what they take."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.search.found import Candidates
from paceline.plan.search.pareto import front_of
from paceline.spec.plan import QUANTITIES, Plan


@dataclass(frozen=True)
class Front:
    """The plans of a front, in rising order of time, and the quantities that it weighs.

    Each of `plans` has `plan`, `risk` (the chance to run out of memory) and what it takes: `time`, `memory`, `money`,
    `energy` and `carbon`, NaN where unknown.
    """

    over: tuple[str, ...]
    plans: tuple[dict[str, Plan | float], ...]


def front_plans(candidates: Candidates) -> Front:
    """Return the front of a search's candidates, near ones left out."""
    places, names = front_of(candidates.values)
    return Front(names, tuple(_taken(candidates, int(place)) for place in places))


def _taken(candidates: Candidates, place: int) -> dict[str, Plan | float]:
    values = candidates.values
    takes = {name: float(getattr(values, name)[place]) for name in QUANTITIES}
    return {"plan": candidates.plan(place), "risk": float(values.risk[place]), **takes}
