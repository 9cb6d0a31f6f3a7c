"""Goals of one quantity and of several, the risk of running out of memory, deadlines and budgets."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import cluster, opened, profile

from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.cost.memory.usable import usable_bytes
from paceline.plan.cost.pricing import memory_widths
from paceline.plan.risk.chance import chance_above
from paceline.plan.search.found import SearchResult
from paceline.plan.search.search import search
from paceline.plan.search.values import SAFE, Values, goal_values
from paceline.spec.cluster import Figure
from paceline.spec.load import dump_toml, parse_spec, spec_from_dict, spec_to_dict
from paceline.spec.plan import QUANTITIES, GoalSpec, PlanSpec
from paceline.units import Seconds

SHAPE = opened(profile(8, heads=8, kv_heads=4, kv_elements=2e4))
UNKNOWN = Figure(math.nan, "unknown")


def found(**changes: object) -> SearchResult:
    where = changes.pop("where", None) or cluster(8, memory_bytes=4e8, carbon_g_per_kwh=Figure(100.0, "published"))
    return search(SHAPE, where, PlanSpec(**changes), batch_samples=64, steps=1000)


def values(**columns: list[float]) -> Values:
    size = len(next(iter(columns.values())))
    unknown = {name: [math.nan] * size for name in QUANTITIES}
    filled = {**unknown, "risk": [0.0] * size, **columns}
    return Values(**{name: np.array(column, dtype=float) for name, column in filled.items()})


def test_a_goal_is_a_name_or_a_table_of_weights_in_files_on_the_command_line_and_in_python() -> None:
    named = parse_spec('[plan]\ngoal = "money"').plan.goal
    assert named.weights == {"money": 1.0} and str(named) == "money" and named == PlanSpec(goal="money").goal
    weighted = parse_spec("[plan]\ngoal = { time = 7, money = 3 }").plan.goal
    assert weighted.weights == {"time": 0.7, "money": 0.3} and str(weighted) == "0.7 time + 0.3 money"
    assert weighted == PlanSpec(goal={"time": 7, "money": 3}).goal
    assert parse_spec("", overrides=["plan.goal.carbon=1"]).plan.goal.weights == {"carbon": 1.0}
    assert parse_spec("", overrides=["plan.goal=energy"]).plan.goal == GoalSpec("energy")
    spec = parse_spec("[plan]\ngoal = { time = 7, money = 3 }\ndeadline = '20 h'\nbudget_usd = 5000")
    assert spec.plan.deadline == 72000 and spec.plan.budget_usd == 5000
    assert parse_spec(dump_toml(spec)) == spec == spec_from_dict(spec_to_dict(spec))
    for wrong in ('goal = "speed"', "goal = { speed = 1 }", "goal = { time = -1 }", "memory_risk = 0.6"):
        with pytest.raises(ConfigError):
            parse_spec(f"[plan]\n{wrong}")
    with pytest.raises(ConfigError, match="speed"):
        PlanSpec(goal="speed")


def test_a_goal_is_the_weighted_sum_over_the_least() -> None:
    some = values(time=[1.0, 2.0, 4.0], money=[30.0, 10.0, 20.0], memory=[5.0, 5.0, 1.0])
    assert goal_values(some, {"time": 1.0}).tolist() == [1, 2, 4]
    assert goal_values(some, {"time": 0.5, "money": 0.25, "memory": 0.25}) == pytest.approx([2.5, 2.5, 2.75])


def test_what_is_unknown_of_every_plan_is_ranked_by_what_it_goes_with() -> None:
    some = values(time=[1.0, 2.0], memory=[2.0, 1.0])
    for quantity in ("money", "energy", "carbon"):
        assert goal_values(some, {quantity: 1.0}).tolist() == [1, 2]
    assert goal_values(values(time=[1, 2], energy=[9, 3]), {"carbon": 1.0}).tolist() == [3, 1]
    assert goal_values(values(time=[math.nan, 2.0]), {"time": 1.0}).tolist() == [math.inf, 1]
    assert goal_values(values(time=[math.nan] * 2), {"time": 1.0}).tolist() == [1, 1]


def test_what_no_plan_takes_any_of_is_ranked_by_what_it_goes_with() -> None:
    """A price of 0 of devices of one's own, or power without carbon, made every plan as good as any: 0 over 0."""
    some = values(time=[1.0, 2.0], money=[0.0, 0.0], energy=[9, 3], carbon=[0.0, 0.0])
    assert goal_values(some, {"money": 1.0}).tolist() == [1, 2]
    assert goal_values(some, {"carbon": 1.0}).tolist() == [3, 1]
    assert goal_values(some, {"time": 0.5, "money": 0.5}).tolist() == [1, 2]
    assert goal_values(values(time=[1, 2, 3], money=[4, 0, 0]), {"money": 1.0}).tolist() == [math.inf, 1, 1]
    free = Figure(0.0, "published")
    chosen = found(where=cluster(8, memory_bytes=4e8, price_usd_per_device_hour=free), goal="money", budget_usd=5.0)
    assert chosen.best.plan == found().best.plan


def test_running_out_of_memory_costs_the_fallback() -> None:
    some = values(time=[1.0, 1.2, 1.1], memory=[9, 5, 8], risk=[0.2, 0.0, 0.1])
    assert some.expected("time") == pytest.approx([0.8 + 0.2 * 1.2, 1.2, 0.9 * 1.1 + 0.1 * 1.2])
    assert some.expected("memory").tolist() == [9, 5, 8]
    only = values(time=[1.0, 1.2], risk=[0.2, 0.1])
    assert only.expected("time") == pytest.approx([0.8 + 0.2 * 1.2, 1.2]), "no safe one: the safest"


@settings(max_examples=8, deadline=None)
@given(st.dictionaries(st.sampled_from(QUANTITIES), st.floats(0.1, 10), min_size=1))
def test_the_search_ranks_by_the_goal(goal: dict[str, float]) -> None:
    result = found(goal=goal, pp=1, cp=1, recompute="none")
    candidates, total = result.candidates, sum(goal.values())
    expected = np.zeros(len(candidates))
    risk = candidates.values.risk
    safe = risk <= max(SAFE, risk.min())
    of = {"time": "step_seconds", "memory": "peak_bytes", "money": "usd", "energy": "kwh", "carbon": "carbon_g"}
    forecasts = [candidate.forecast for candidate in candidates]
    for quantity, weight in goal.items():
        taken = np.array([getattr(forecast, of[quantity]).value for forecast in forecasts])
        if quantity != "memory":
            taken = taken * (1 - risk) + risk * taken[safe].min()
        expected += weight / total * taken / taken.min()
    assert candidates.scores == pytest.approx(expected)
    assert expected[0] <= 1.02 * expected.min()
    beyond = expected[expected > 1.02 * expected.min()]
    assert (np.diff(beyond) >= 0).all()


def test_less_risk_leaves_fewer_plans_and_each_keeps_it() -> None:
    counts = []
    for risk in (0.3, 0.1, 0.01):
        result = found(memory_risk=risk)
        counts.append(len(result.candidates))
        context, taken = result.candidates.context, result.candidates.values
        chance = chance_above(
            taken.memory, usable_bytes(context.cluster), *memory_widths(context.cluster, context.constants)
        )
        assert taken.risk == pytest.approx(chance) and taken.risk.max() <= risk + 1e-6
        assert all("needs up to" in result.refused[-1].because for _ in result.refused[-1:])
    assert counts[0] > counts[1] > counts[2] > 0
    assert "with a chance of 99%" in found(memory_risk=0.01).refused[-1].because


def test_a_deadline_refuses_what_is_too_late_with_the_reason() -> None:
    free = found()
    seconds = free.candidates.values.time * 1000
    limit = float(np.median(seconds))
    result = found(deadline=Seconds(limit))
    assert len(result.candidates) == int((seconds <= limit).sum())
    assert len(result.refused) == len(free.refused) + int((seconds > limit).sum())
    first, beyond = len(result.refused.told), len(result.refused.beyond)
    assert beyond == int((seconds > limit).sum()) > 20
    for refusal in result.refused[first : first + beyond : beyond // 20]:
        assert "deadline" in refusal.because and "takes" in refusal.because
    fastest = float(seconds.min())
    with pytest.raises(DoesNotFit, match="keeps no") as error:
        found(deadline=Seconds(fastest * 0.9))
    assert "takes" in error.value.because and "devices" in error.value.try_ and error.value.exit_code == 3


def test_a_budget_refuses_what_costs_more_and_failures_count() -> None:
    free = found()
    usd = free.candidates.values.money
    limit = float(np.median(usd))
    assert len(found(budget_usd=limit).candidates) == int((usd <= limit).sum())
    where = cluster(8, memory_bytes=4e8)
    halved = search(SHAPE, where, PlanSpec(budget_usd=limit), batch_samples=64, steps=1000, goodput=0.9)
    assert len(halved.candidates) == int((usd <= 0.9 * limit).sum())
    for limit in ({"budget_usd": 1e9}, {"deadline": Seconds(1e12)}):  # failures take all of the time
        with pytest.raises(DoesNotFit, match="keeps no") as never:
            search(SHAPE, where, PlanSpec(**limit), batch_samples=64, steps=1000, goodput=0.0)
        assert "never ends" in never.value.because
    with pytest.raises(DoesNotFit, match="budget") as error:
        found(budget_usd=float(usd.min()) * 0.2505)
    assert "costs $" in error.value.because and "pays for 250 of 1,000 steps" in error.value.because


def test_a_limit_on_what_is_unknown_is_an_error() -> None:
    with pytest.raises(ConfigError, match="budget_usd = 5 cannot be checked"):
        found(budget_usd=5.0, where=cluster(4, price_usd_per_device_hour=UNKNOWN))
    slow = cluster(4, kind="cuda")
    slow = dataclasses.replace(slow, device=dataclasses.replace(slow.device, matmul_flops={}, attention_flops={}))
    with pytest.raises(ConfigError, match="cannot be checked"):
        found(deadline=Seconds(5.0), where=slow)
