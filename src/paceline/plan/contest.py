"""Contest: which plans may turn out better than the chosen one, and which few are worth a try.

Forecasts of plans of one task on one cluster err together. What they share, the rate of products above all, cancels
when two plans are compared, so that intervals which overlap say little. Here every cause of error (products, attention,
memory, each kind of communication) is off by a factor that all plans share, and every plan by one more of its own; the
factors are drawn many times, and each time one plan is best. `benchmarks/choices.py` holds both spreads against
measured grids of layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.columns import AXES, Columns, Floats, Ints
from paceline.plan.cost.inputs import Column, Context, Sheet
from paceline.plan.cost.total import time_columns
from paceline.plan.forecast import Estimate
from paceline.plan.plan import Plan
from paceline.plan.search import Candidates

# Terms that err together, because one rate stands behind them; any other term is a cause of its own.
CAUSES = {
    "products, forward": "products",
    "products, backward": "products",
    "memory-bound operators": "memory",
    "casts and gradient sums": "memory",
    "optimizer": "memory",
    "operator launches": "host",
    "fixed step overhead": "host",
}
# Standard deviations of logarithms, as parts of that of the whole forecast.
CAUSE_SHARE = 1.0
OWN_SHARE = 0.25
DRAWS, SEED = 2000, 0
LOOKED_AT, COMPARED = 4096, 64  # candidates that are looked at, and kinds of plan of which the best are compared
TRIED, WORTH_TRYING = 3, 0.01  # plans to try at most, and what trying one more must gain on average


@dataclass(frozen=True)
class Contender:
    """A plan that may be best: its chance, and what it takes more than the best of each draw, on average."""

    plan: Plan
    chance_best: float
    regret: float


@dataclass(frozen=True)
class Contest:
    """The chosen plan first, then those worth a try.

    `regret` is what the chosen plan takes beyond the best one on average, as a fraction, `regret_tried` what is left of
    it after trying all of these and taking the best.
    """

    contenders: tuple[Contender, ...]
    compared: int
    regret: float
    regret_tried: float

    @property
    def is_open(self) -> bool:
        """Whether there is something worth a try."""
        return len(self.contenders) > 1


def contest(candidates: Candidates, weights: Mapping[str, float], step: Estimate) -> Contest:
    """Return the contest among candidates for a goal of these weights. `step` is the chosen plan's time.

    Of money, energy and carbon only the time in them is taken as uncertain.
    """
    places = kinds(candidates.columns.take(slice(0, LOOKED_AT)))[:COMPARED]
    plans = candidates.columns.take(places)
    if len(places) == 1 or not math.isfinite(step.value):
        return Contest((Contender(plans.plan(0), 1.0, 0.0),), 1, 0.0, 0.0)
    factors = drawn_factors(candidates.context, plans, math.log(step.high / step.value) / 1.2816)
    costs = candidates.scores[places][:, None] * (1 - weights.get("memory", 0.0)) * factors
    if "memory" in weights:
        least = np.min(candidates.values.memory)
        costs = costs + weights["memory"] * (candidates.values.memory[places] / least)[:, None]
    return judged(plans, costs)


def kinds(columns: Columns) -> Ints:
    """Return the first place of every different kind of plan: layout, schedule, recompute and sharding class."""
    fields = [*(getattr(columns, axis) for axis in AXES), columns.schedule, columns.virtual_stages, columns.recompute]
    rows = np.stack([*fields, np.where(columns.state_degree > 1, columns.zero, 0)], axis=1)
    places: Ints = np.sort(np.unique(rows, axis=0, return_index=True)[1])
    return places


def drawn_factors(context: Context, plans: Columns, spread: float) -> Floats:
    """Return for every plan and draw its time over its forecast (plan x draw).

    `spread` is the standard deviation of the logarithm of one plan's time; see CAUSE_SHARE and OWN_SHARE.
    """
    parts = cause_seconds(time_columns(Sheet(context, plans)))
    shares = parts / parts.sum(axis=1, keepdims=True)
    random = np.random.default_rng(SEED)
    causes = _factors(random.standard_normal((parts.shape[1], DRAWS)), CAUSE_SHARE * spread)
    own = _factors(random.standard_normal((len(plans), DRAWS)), OWN_SHARE * spread)
    found: Floats = shares @ causes * own
    return found


def _factors(normal: Floats, spread: float) -> Floats:
    """Return log-normal factors of mean 1."""
    return np.exp(spread * normal - spread**2 / 2)


def cause_seconds(columns: list[Column]) -> Floats:
    """Return every plan's seconds by cause of error (plan x cause)."""
    found: dict[str, Floats] = {}
    for column in columns:
        cause = CAUSES.get(column.name, column.name)
        found[cause] = found.get(cause, 0.0) + column.values
    return np.stack(list(found.values()), axis=1)


def judged(plans: Columns, costs: Floats) -> Contest:
    """Return the contest by the costs of plans in every draw (plan x draw); the first plan is the chosen one."""
    ratios = costs / costs.min(axis=0)
    best = np.bincount(np.argmin(costs, axis=0), minlength=len(plans)) / costs.shape[1]
    chosen, lowest = [0], ratios[0]
    while len(chosen) < min(TRIED, len(plans)):
        averages = np.minimum(ratios, lowest).mean(axis=1)
        place = int(np.argmin(averages))
        if lowest.mean() - averages[place] < WORTH_TRYING:
            break
        chosen.append(place)
        lowest = np.minimum(lowest, ratios[place])
    regrets = ratios.mean(axis=1) - 1
    contenders = tuple(Contender(plans.plan(i), float(best[i]), float(regrets[i])) for i in chosen)
    return Contest(contenders, len(plans), float(regrets[0]), float(lowest.mean() - 1))
