"""Contests: what plans share cancels, what they differ in does not, and the plans to try are the best few to try."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from plan_examples import cluster, opened, plans_of, profile

from paceline.plan.cost.components import cause_seconds
from paceline.plan.risk.contest import (
    SETTING_SPREAD,
    TRIED,
    WORTH_TRYING,
    contest,
    drawn_factors,
    judge,
    settings_of,
)
from paceline.plan.search.search import search
from paceline.spec.forecast import Kind
from paceline.spec.plan import PlanSpec

SHAPE = opened(profile(8, heads=8, kv_heads=4, kv_elements=2e4))


def test_what_two_plans_share_cancels() -> None:
    causes = np.array([[3.0, 1.0], [6.0, 2.0]])  # the same shares of time
    factors = drawn_factors(causes, np.array([[1, 2], [1, 2]]), 0.3)
    assert factors[0] == pytest.approx(factors[1])
    assert np.std(np.log(factors[0])) > 0.15, "each alone is as uncertain as before"


def test_one_setting_errs_by_its_own_factor() -> None:
    factors = drawn_factors(np.ones((2, 1)), np.array([[1, 2], [1, 3]]), 0.3)
    assert np.std(np.log(factors[0] / factors[1])) == pytest.approx(math.sqrt(2) * SETTING_SPREAD, rel=0.05)
    assert factors.mean(axis=1) == pytest.approx([1, 1], abs=0.02)


def test_causes_err_in_proportion_to_their_share() -> None:
    causes = np.array([[1.0, 0.0], [0.5, 0.5]])
    factors = drawn_factors(causes, np.zeros((2, 1), dtype=np.int64), 0.1)
    # log(a / (a + b) 2) of two factors near 1 is (log a - log b) / 2
    assert np.std(np.log(factors[0] / factors[1])) == pytest.approx(0.1 * math.sqrt(2) / 2, rel=0.06)


def test_terms_of_one_rate_are_one_cause() -> None:
    one = np.ones(3)
    kinds: tuple[Kind, ...] = ("products", "products", "update", "elementwise", "bubble")
    assert cause_seconds((str(place), kind, one) for place, kind in enumerate(kinds)).tolist() == [[2.0, 2.0, 1.0]] * 3
    links: tuple[Kind, ...] = ("collectives", "collectives")
    assert cause_seconds((str(place), kind, one) for place, kind in enumerate(links)).tolist() == [[1.0, 1.0]] * 3


def test_the_plans_to_try_are_the_best_to_add_each_time() -> None:
    random = np.random.default_rng(3)
    costs = random.uniform(1, 2, (7, 500))
    verdict = judge(costs)
    ratios = costs / costs.min(axis=0)

    def left(tried: tuple[int, ...]) -> float:
        return float(ratios[list(tried)].min(axis=0).mean() - 1)

    assert verdict.tried[0] == 0 and len(verdict.tried) == TRIED
    for count in range(1, TRIED):
        before = verdict.tried[:count]
        best = min(left((*before, other)) for other in range(7))
        assert left(verdict.tried[: count + 1]) == pytest.approx(best)
    assert verdict.regret_tried == pytest.approx(left(verdict.tried))
    assert verdict.regrets[0] == pytest.approx(left((0,))) and verdict.chance_best.sum() == pytest.approx(1)
    wins = [int((costs.argmin(axis=0) == place).sum()) / 500 for place in range(7)]
    assert verdict.chance_best.tolist() == wins


def test_nothing_is_worth_a_try_beside_a_clear_winner() -> None:
    costs = np.array([[1.0] * 10, [2.0] * 10, [1.0 + WORTH_TRYING / 2] * 10])
    verdict = judge(costs)
    assert verdict.tried == (0,) and verdict.chance_best.tolist() == [1, 0, 0] and verdict.regret_tried == 0


def test_a_search_has_a_contest_of_kinds_of_plan() -> None:
    result = search(SHAPE, cluster(8), PlanSpec(), batch_samples=64, steps=10)
    step = result.best.forecast.step_seconds
    found = contest(result.candidates, {"time": 1.0}, step)
    assert found.contenders[0].plan == result.best.plan and 1 < len(found.contenders) <= TRIED
    assert found.is_open and 0 < found.regret_tried < found.regret
    assert contest(result.candidates, {"time": 1.0}, step) == found, "drawn alike each time"
    upwards = dataclasses.replace(step, low=step.value / 1.1, high=step.high / step.low * step.value / 1.1)
    again = contest(result.candidates, {"time": 1.0}, upwards)
    assert again.regret == pytest.approx(found.regret), "plans err to both sides, as an interval does in the mean"
    settings = settings_of(result.candidates.columns)
    places = {chosen: place for place, chosen in enumerate(plans_of(result))}
    kinds = [tuple(settings[places[contender.plan]]) for contender in found.contenders]
    assert len(set(kinds)) == len(kinds)
    for one, other in itertools.combinations(found.contenders, 2):
        assert one.plan != other.plan


def test_memory_is_taken_as_known() -> None:
    result = search(SHAPE, cluster(8), PlanSpec(goal="memory"), batch_samples=64, steps=10)
    found = contest(result.candidates, {"memory": 1.0}, result.best.forecast.step_seconds)
    assert not found.is_open and found.compared == 1
    both = {"memory": 0.5, "time": 0.5}
    result = search(SHAPE, cluster(8), PlanSpec(goal=both), batch_samples=64, steps=10)
    mixed = contest(result.candidates, both, result.best.forecast.step_seconds)
    result = search(SHAPE, cluster(8), PlanSpec(), batch_samples=64, steps=10)
    assert mixed.regret < contest(result.candidates, {"time": 1.0}, result.best.forecast.step_seconds).regret


def test_a_single_plan_is_no_contest() -> None:
    only = PlanSpec(dp_replicate=8, micro_batch=8, recompute="none")
    result = search(SHAPE, cluster(8), only, batch_samples=64, steps=10)
    found = contest(result.candidates, {"time": 1.0}, result.best.forecast.step_seconds)
    assert not found.is_open and found.compared == 1
