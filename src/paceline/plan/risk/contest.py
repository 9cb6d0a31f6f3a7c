"""Contest: which plans may turn out better than the chosen one, and which few are worth a try.

Forecasts of plans of one task on one cluster err together, so that intervals which overlap say little: what two plans
share cancels. Here a forecast is off by a factor for each cause (products, attention, memory, each kind of
communication), which all plans share in proportion to what the cause is of their time, and by a factor for each setting
(a degree, the micro-batch, recompute, the schedule), which all plans share that agree in it. The factors are drawn many
times, and each time one plan is best. `benchmarks/choices.py` holds this against measured grids of layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.columns import Columns, Floats, Ints
from paceline.plan.cost.components import cause_seconds, without
from paceline.plan.cost.pricing import time_components
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.search.found import Candidates
from paceline.spec.forecast import Z80, Estimate
from paceline.spec.plan import Plan

# Standard deviation of a setting's logarithm: the median over the three calibration tables that are grids, as
# `benchmarks/choices.py` measures it (4 to 42 %). A cause is as uncertain as a plan's whole time.
SETTING_SPREAD = 0.10
DRAWS, SEED = 2000, 0
LOOKED_AT, COMPARED = 4096, 64  # candidates that are looked at, and kinds of plan of which the best are compared
TRIED, WORTH_TRYING = 3, 0.01  # plans to try at most, and what trying one more must gain on average


@dataclass(frozen=True)
class Contender:
    """A plan that may be best: the chance that it is, and by what fraction it is worse than the best on average."""

    plan: Plan
    chance_best: float
    regret: float


@dataclass(frozen=True)
class Contest:
    """The chosen plan first, then the plans worth a try, of `compared` kinds of plan.

    `regret` is the fraction by which the chosen plan is worse than the best plan on average (0.03: a step takes 3 %
    more time); `regret_tried` is what is left of the regret when all these plans were tried and the best was taken.
    """

    contenders: tuple[Contender, ...]
    compared: int
    regret: float
    regret_tried: float

    @property
    def is_open(self) -> bool:
        """Whether there is something worth a try."""
        return len(self.contenders) > 1


@dataclass(frozen=True)
class Verdict:
    """Places of plans worth a try, the chosen one's (0) first; every plan's chance and regret; what is left of it."""

    tried: tuple[int, ...]
    chance_best: Floats
    regrets: Floats
    regret_tried: float


def contest(candidates: Candidates, weights: Mapping[str, float], step: Estimate) -> Contest:
    """Return the contest among candidates for a goal of these weights. `step` is the chosen plan's time.

    Of money, energy and carbon only the time in them is taken as uncertain, and memory not at all: a goal of memory
    alone has no contest, and neither has a time that is unknown.
    """
    settings = settings_of(candidates.columns.take(slice(0, LOOKED_AT)))
    places = np.sort(np.unique(settings, axis=0, return_index=True)[1])[:COMPARED]
    plans = candidates.columns.take(places)
    if len(places) == 1 or not math.isfinite(step.value) or set(weights) == {"memory"}:
        return Contest((Contender(plans.plan(0), 1.0, 0.0),), 1, 0.0, 0.0)
    spread = math.log(step.high / step.low) / 2 / Z80
    factors = drawn_factors(_cause_seconds(candidates.context, plans), settings[places], spread)
    fixed = np.zeros(len(places))
    if "memory" in weights:
        fixed = weights["memory"] * candidates.values.memory[places] / np.min(candidates.values.memory)
    verdict = judge((candidates.scores[places] - fixed)[:, None] * factors + fixed[:, None])
    contenders = tuple(
        Contender(plans.plan(place), float(verdict.chance_best[place]), float(verdict.regrets[place]))
        for place in verdict.tried
    )
    return Contest(contenders, len(places), float(verdict.regrets[0]), verdict.regret_tried)


def settings_of(columns: Columns) -> Ints:
    """Return the settings of plans whose forecasts err by a factor of their own (plan x setting)."""
    fields = [columns.tp, columns.pp, columns.cp, columns.ep, columns.state_degree > 1, columns.micro_batch]
    fields += [columns.recompute, columns.schedule * 1000 + columns.virtual_stages]
    return np.stack(fields, axis=1).astype(np.int64)


def _cause_seconds(context: PricedTask, plans: Columns) -> Floats:
    """Return every plan's seconds by cause (plan x cause).

    What was learnt from runs is none: it is a part of the sum of the others, often below zero, and moves as they do.
    """
    columns = without(time_components(Sheet(context, plans)), "learnt")
    return cause_seconds((column.name, column.kind, column.values) for column in columns)


def drawn_factors(causes: Floats, settings: Ints, spread: float) -> Floats:
    """Return for every plan and draw its time over its forecast (plan x draw).

    `causes` are seconds (plan x cause), `settings` are equal where plans share a setting (plan x setting), `spread` is
    the standard deviation of the logarithm of a plan's time.
    """
    random = np.random.default_rng(SEED)

    def drawn(count: int, deviation: float) -> Floats:
        """Return log-normal factors of mean 1 (count x draw)."""
        normal = random.standard_normal((count, DRAWS))
        factors: Floats = np.exp(deviation * normal - deviation**2 / 2)
        return factors

    found: Floats = causes / causes.sum(axis=1, keepdims=True) @ drawn(causes.shape[1], spread)
    for column in settings.T:
        different, which = np.unique(column, return_inverse=True)
        if len(different) > 1:  # else it cancels
            found = found * drawn(len(different), SETTING_SPREAD)[which]
    return found


def judge(costs: Floats) -> Verdict:
    """Return the verdict on plans by what each costs in every draw (plan x draw); the first is the chosen one."""
    ratios = costs / costs.min(axis=0)
    chances = np.bincount(np.argmin(costs, axis=0), minlength=len(costs)) / costs.shape[1]
    tried, lowest = [0], ratios[0]
    while len(tried) < min(TRIED, len(costs)):
        averages = np.minimum(ratios, lowest).mean(axis=1)
        place = int(np.argmin(averages))
        if lowest.mean() - averages[place] < WORTH_TRYING:
            break
        tried.append(place)
        lowest = np.minimum(lowest, ratios[place])
    return Verdict(tuple(tried), chances, ratios.mean(axis=1) - 1, float(lowest.mean() - 1))
