"""Alternatives: for every axis and mode, the best plan with it and the best without, and the term that decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.columns import AXES, Columns, Flags
from paceline.plan.cost.pricing import price_all
from paceline.plan.search.found import SearchResult
from paceline.spec.forecast import Forecast
from paceline.spec.plan import Plan
from paceline.units import format_seconds

NOTABLE = 0.005  # of a step: a term that differs by less decides nothing


@dataclass(frozen=True)
class Alternative:
    """The best plan that differs in one choice: of a plan that uses recompute, the best one that does not.

    `slower` is its step time over the chosen plan's, less 1. Without a plan, `because` is why there is none.
    """

    choice: str  # "tp", "recompute", ...
    has_it: bool  # whether the alternative has what the chosen plan does without, or the other way round
    plan: Plan | None
    slower: float
    because: str


def alternatives(found: SearchResult) -> tuple[Alternative, ...]:
    """Return the other side of every choice that there was: axes in use or not, recompute, ZeRO-3, a schedule.

    A side of which no plan fits is told with the one that came nearest; one that the space never had is left out.
    """
    candidates = found.candidates
    sides = _sides(candidates.columns)
    large = _sides(found.refused.too_large) if len(found.refused.too_large) else {}
    beyond = _sides(found.refused.beyond) if len(found.refused.beyond) else {}
    places = {choice: int(other[0]) for choice, side in sides.items() if len(other := np.flatnonzero(side != side[0]))}
    priced = price_all(candidates.context, candidates.columns.take(list(places.values())))
    forecasts = dict(zip(places, priced, strict=True))
    told = []
    for choice, side in sides.items():
        has_it = not side[0]
        if choice in places:
            plan, forecast = forecasts[choice]
            slower = forecast.step_seconds.value / found.best.forecast.step_seconds.value - 1
            told.append(Alternative(choice, has_it, plan, slower, deciding_terms(found.best.forecast, forecast)))
            continue
        offset = len(found.refused.told)
        for there in (beyond, large):
            nearest = np.flatnonzero(there[choice] == has_it if there else False)
            if len(nearest):
                refusal = found.refused[offset + int(nearest[0])]
                told.append(Alternative(choice, has_it, None, math.nan, f"{refusal.plan} {refusal.because}"))
                break
            offset += len(found.refused.beyond)
    return tuple(told)


def _sides(columns: Columns) -> dict[str, Flags]:
    """Return for every choice which plans have it."""
    sides = {axis: getattr(columns, axis) > 1 for axis in AXES}
    sides["recompute"] = ~columns.recomputes("none")
    sides["ZeRO-3"] = (columns.state_degree > 1) & (columns.zero == 3)
    sides["interleaved"] = (columns.pp > 1) & columns.scheduled("interleaved")
    return sides


def deciding_terms(chosen: Forecast, other: Forecast) -> str:
    """Return what the other plan takes more, and what it takes less, in its most different terms of time."""
    mine, theirs = ({term.name: term.value for term in forecast.time} for forecast in (chosen, other))
    more = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {**mine, **theirs}}
    enough = NOTABLE * chosen.step_seconds.value
    largest = sorted((name for name in more if more[name] > enough), key=lambda name: -more[name])
    least = sorted((name for name in more if more[name] < -enough), key=lambda name: more[name])
    parts = [f"{name} +{format_seconds(more[name])}" for name in largest[:2]]
    parts += [f"{name} -{format_seconds(-more[name])}" for name in least[:1]]
    return ", ".join(parts) or "no term differs by much"
