"""Plans that need less memory: priced as the planner prices them, the smallest change first, none for nothing."""

from __future__ import annotations

import dataclasses
import json

import pytest
from plan_examples import cluster, profile

from paceline.plan.cost.pricing import price
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.feasible.micro_batch import with_micro_batch
from paceline.plan.search.micro_batch import worth_a_try
from paceline.plan.smaller import smaller_plans
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.survive.smaller import smaller_from_dict

PLAN = with_micro_batch(Plan(Layout(dp_shard=2), batch_samples=26, precision="bf16"), 13)


@pytest.mark.parametrize("plan", [PLAN, dataclasses.replace(PLAN, recompute="selective"),
                                  dataclasses.replace(PLAN, rows=(20, 6), micro_batch=13, accumulation=2)])  # fmt: skip
def test_each_is_smaller_than_what_changes_less_and_has_the_planners_price(plan: Plan) -> None:
    context = PricedTask(profile(), cluster(2, "cuda"), 26, 10)
    found = smaller_plans(context, plan)
    assert found and found[0].change.count("=") == 1
    counts, sizes = [each.change.count("=") for each in found], [each.bytes for each in found]
    assert counts == sorted(counts) and sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    for each in found:
        changed = dataclasses.replace(plan, micro_batch=each.micro_batch, accumulation=each.accumulation,
                                      recompute=each.recompute, offload=each.offload)  # fmt: skip
        assert changed == dataclasses.replace(with_micro_batch(plan, each.micro_batch), recompute=each.recompute,
                                              offload=each.offload)  # fmt: skip
        again = price(context, changed)
        assert each.step_seconds == pytest.approx(again.step_seconds.value)
        weights = sum(term.value for term in again.memory if term.kind == "weights")
        assert each.held["weights"] == pytest.approx(weights)
        assert smaller_from_dict(json.loads(json.dumps(dataclasses.asdict(each)))) == each


def test_the_smallest_plan_of_all_has_none() -> None:
    context = PricedTask(profile(), cluster(2, "cuda"), 2, 10)
    least = Plan(Layout(dp_shard=2), batch_samples=2, recompute="full", offload="all")
    assert smaller_plans(context, least) == ()


def test_what_is_worth_a_try_is_half_and_twice_as_much() -> None:
    context = PricedTask(profile(), cluster(2, "cuda"), 26, 10)
    assert worth_a_try(context, with_micro_batch(PLAN, 4)) == (2, 4, 8)
    assert worth_a_try(context, PLAN) == (6, 13), "a device's part of the batch is 13"
    assert worth_a_try(context, with_micro_batch(PLAN, 1)) == (1, 2)
