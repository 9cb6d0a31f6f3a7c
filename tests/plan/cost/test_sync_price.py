"""The price of how copies stay in step: what an outer step and bf16 save in communication, and hold in memory."""

from __future__ import annotations

import dataclasses

import pytest
from plan_examples import cluster, profile

from paceline.errors import DoesNotFit
from paceline.plan.feasible.refusals import copies_in_step, plan_refusal
from paceline.plan.search.found import SearchResult
from paceline.plan.search.search import search
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.sync import Sync


def found(sync: Sync, kind: str = "cpu") -> SearchResult:
    asked = PlanSpec(dp_replicate=4, micro_batch=4, recompute="none", precision="fp32", sync=sync)
    return search(profile(), cluster(4, kind), asked, batch_samples=64, steps=10)


def terms(sync: Sync, kind: str = "cpu") -> tuple[dict[str, float], dict[str, float]]:
    """Return the terms of time and of memory of the best plan, which keeps the sync."""
    best = found(sync, kind).best
    assert best.plan.sync == sync
    time = {term.name: term.value for term in best.forecast.time}
    return time, {term.name: term.value for term in best.forecast.memory}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_copies_meet_once_in_so_many_steps(kind: str) -> None:
    one, memory = terms(Sync("outer", every=1, momentum=0.9), kind)
    ten, _ = terms(Sync("outer", every=10, momentum=0.9), kind)
    assert ten["outer step"] == pytest.approx(one["outer step"] / 10) and one["outer step"] > 0
    assert "gradient reduction" not in one, "copies sum no gradients"
    assert memory["copies in step"] == 2 * memory["weights"], "shared weights, and the outer momentum"


def test_an_outer_step_in_every_step_costs_what_summing_gradients_costs() -> None:
    exact, memory = terms(Sync())
    outer, _ = terms(Sync("outer"))
    assert outer["outer step"] == pytest.approx(exact["gradient reduction"])
    assert "outer step" not in exact and "copies in step" not in memory


def test_gradients_in_bf16_are_gathered_from_every_copy() -> None:
    exact, _ = terms(Sync())
    rounded, memory = terms(Sync(wire="bf16"))
    # Of n copies a ring all-reduce moves 2 (n - 1) / n x 4 B of a value, a gather (n - 1) x 2 B: as much for 4 copies.
    assert rounded["gradient reduction"] == pytest.approx(exact["gradient reduction"], rel=0.35)
    assert memory["copies in step"] == memory["weights"], "what was left out"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layout": Layout(dp_replicate=2, dp_shard=2, ep=2)}, "not proven with ep"),
        ({"precision": "fp16"}, "overflow apart"),
        ({"offload": "optimizer"}, "rests in host memory"),
    ],
)
def test_what_is_not_proven_is_refused(change: dict, says: str) -> None:
    plan = Plan(Layout(dp_replicate=2), accumulation=2, sync=Sync("outer", every=4))
    assert plan_refusal(plan, profile()) is None
    assert says in (plan_refusal(dataclasses.replace(plan, **change), profile()) or "")
    assert plan_refusal(dataclasses.replace(plan, **change, sync=Sync()), profile()) is None


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_an_outer_step_is_open_to_copies_that_are_split_and_a_bf16_wire_where_ranks_leave_out_the_same(
    axis: str,
) -> None:
    plan = Plan(Layout(dp_replicate=2, **{axis: 2}), accumulation=2, sync=Sync("outer", every=4))
    assert copies_in_step(plan, profile()) is None
    because = copies_in_step(dataclasses.replace(plan, sync=Sync(wire="bf16")), profile())
    assert because is None if axis == "cp" else f"with {axis}" in (because or "")


def test_experts_are_refused() -> None:
    plan = Plan(Layout(dp_replicate=2), sync=Sync("outer", every=4))
    assert "experts" in (plan_refusal(plan, profile(experts=4)) or "")
    with pytest.raises(DoesNotFit):
        search(profile(experts=4), cluster(2), PlanSpec(dp_replicate=2, sync=plan.sync), batch_samples=8, steps=10)
