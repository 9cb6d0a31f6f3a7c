"""The other side of every choice, against a walk through all candidates and refusals."""

from __future__ import annotations

import pytest
from plan_examples import cluster, opened, plans_of, profile

from paceline.plan.explain.alternatives import alternatives
from paceline.plan.explain.difference import difference, plan_options
from paceline.plan.search.found import SearchResult
from paceline.plan.search.search import search
from paceline.spec.load import parse_spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.units import Seconds

SHAPE = opened(profile(8, heads=8, kv_heads=4, kv_elements=2e4))


def found(memory_bytes: float = 64e9, **changes: object) -> SearchResult:
    return search(SHAPE, cluster(8, memory_bytes=memory_bytes), PlanSpec(**changes), batch_samples=64, steps=10)


def has(choice: str, plan: Plan) -> bool:
    if choice == "recompute":
        return plan.recompute != "none"
    if choice == "ZeRO-3":
        return plan.layout.state_degree > 1 and plan.zero == 3
    if choice == "interleaved":
        return plan.layout.pp > 1 and plan.schedule == "interleaved"
    return getattr(plan.layout, choice) > 1


def test_each_is_the_first_candidate_on_the_other_side() -> None:
    result = found()
    told = {alternative.choice: alternative for alternative in alternatives(result)}
    assert set(told) == {"dp_replicate", "dp_shard", "cp", "tp", "pp", "recompute", "ZeRO-3", "interleaved"}
    best = result.best
    for choice, alternative in told.items():
        mine = has(choice, best.plan)
        other = next(candidate for candidate in result.candidates if has(choice, candidate.plan) != mine)
        assert alternative.plan == other.plan and alternative.has_it != mine
        slower = other.forecast.step_seconds.value / best.forecast.step_seconds.value - 1
        assert alternative.slower == pytest.approx(slower)


def test_a_plan_that_is_given_whole_has_no_other_side() -> None:
    only = found(
        dp_replicate=1, dp_shard=8, tp=1, pp=1, cp=1, ep=1, zero=3, gradients="shards", recompute="none", micro_batch=1
    )
    assert len(only.candidates) == 1 and not [each for each in alternatives(only) if each.plan]


def test_the_terms_are_those_that_differ_most() -> None:
    result = found()
    tensor = next(alternative for alternative in alternatives(result) if alternative.choice == "tp")
    assert tensor.plan is not None and "tensor communication" in tensor.because


def test_a_side_that_does_not_fit_names_what_came_nearest() -> None:
    result = found(1.6e8)
    told = {alternative.choice: alternative for alternative in alternatives(result) if alternative.plan is None}
    assert told
    for choice, alternative in told.items():
        large = (refusal for refusal in result.refused if "needs up to" in refusal.because)
        nearest = next(refusal for refusal in large if has(choice, refusal.plan) != has(choice, result.best.plan))
        assert alternative.because == f"{nearest.plan} {nearest.because}"


def test_a_side_beyond_a_deadline_says_so() -> None:
    free = found()
    limit = 10 * free.candidates.values.time[free.candidates.columns.tp > 1].min() * 0.999
    result = found(deadline=Seconds(limit))
    tensor = next(alternative for alternative in alternatives(result) if alternative.choice == "tp")
    assert tensor.plan is None and "deadline" in tensor.because


def test_differences_name_what_is_not_the_same() -> None:
    candidates = plans_of(found())
    best = candidates[0]
    assert difference(best, best) == "the same plan"
    for other in candidates[1:200]:
        text = difference(best, other)
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
            mine, theirs = getattr(best.layout, axis), getattr(other.layout, axis)
            assert (f"{axis} {mine}→{theirs}" in text) == (mine != theirs)
        assert text != "the same plan"


@pytest.mark.parametrize("place", [0, 5, 50, 500, -1])
def test_a_plans_options_leave_it_alone(place: int) -> None:
    wanted = found().candidates[place].plan
    spec = parse_spec("", overrides=list(plan_options(wanted, has_experts=False)))
    result = search(SHAPE, cluster(8), spec.plan, batch_samples=64, steps=10)
    assert [candidate.plan for candidate in result.candidates] == [wanted]
