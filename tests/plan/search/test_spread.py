"""A model beside which another only goes forward: where that one rests is priced, chosen and refused."""

from __future__ import annotations

import dataclasses

import pytest
from plan_examples import block, cluster, profile
from plan_examples import plan as example_plan

from paceline.errors import DoesNotFit
from paceline.plan.cost.memory.usable import HEADROOM
from paceline.plan.cost.pricing import price
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.feasible.refusals import refusal
from paceline.plan.placement.traffic import axis_traffic
from paceline.plan.search.found import SearchResult
from paceline.plan.search.search import search
from paceline.spec.layout import Layout
from paceline.spec.plan import PlanSpec
from paceline.spec.profile import ModelProfile

LAYERS, EACH = 8, 4_000_000


def taught() -> ModelProfile:
    """Return a student with a teacher of 8 blocks."""
    student = profile()
    frozen = {"parameters": EACH, "frozen_parameters": EACH, "forward_only_parameters": EACH, "backward_products": 0.0,
              "saved_elements": 0.0, "saved_fp32_elements": 0.0, "selective_elements": 0.0}  # fmt: skip
    blocks = [block(f"teacher.{index}", **frozen) for index in range(LAYERS)]
    return dataclasses.replace(student, blocks=(*blocks, *student.blocks))


def terms(plan: object, kind: str) -> dict[str, float]:
    forecast = price(PricedTask(taught(), cluster(2), 8, 10), plan)
    return {term.name: term.value for term in getattr(forecast, kind)}


def test_a_spread_teacher_rests_over_all_ranks_and_is_gathered_for_every_micro_batch() -> None:
    layout = Layout(dp_replicate=2)
    copied = example_plan(layout, micro_batch=4, batch=8)
    apart = dataclasses.replace(copied, frozen="spread")
    assert terms(copied, "memory")["weights"] - terms(apart, "memory")["weights"] == 4 * LAYERS * EACH / 2
    assert terms(apart, "memory")["weight copies"] == 4 * 2 * EACH, "two blocks are whole at once"
    assert "frozen model gathering" not in terms(copied, "time")
    once = terms(apart, "time")["frozen model gathering"]
    assert once > 4 * LAYERS * EACH / 2 / 1e9, "half of it comes over the link"
    twice = dataclasses.replace(apart, micro_batch=2, accumulation=2)
    assert terms(twice, "time")["frozen model gathering"] == pytest.approx(2 * once)


def test_a_sharded_teacher_is_gathered_once_and_its_student_twice() -> None:
    """It was priced as if its weights came back for a backward pass."""
    third = example_plan(Layout(dp_shard=2), micro_batch=4, batch=8)
    alone = price(PricedTask(profile(), cluster(2), 8, 10), third)
    student = next(term.value for term in alone.time if term.name == "parameter gathering")
    both = terms(third, "time")["parameter gathering"]
    assert both - student == pytest.approx(4 * LAYERS * EACH * (1 / 2 / 1e9 + 2 / 1e10), rel=0.02)


def found(memory_bytes: float, **constraints: object) -> SearchResult:
    where = cluster(2, memory_bytes=memory_bytes)
    return search(taught(), where, PlanSpec(dp_replicate=2, **constraints), batch_samples=8, steps=10)


def test_the_planner_spreads_a_teacher_where_its_copies_do_not_fit() -> None:
    roomy = found(64e9)
    assert roomy.best.plan.frozen == "as-model"
    copied, apart = (found(64e9, frozen=how).candidates.values.memory.min() for how in ("as-model", "spread"))
    assert apart < copied - EACH
    tight = (copied + apart) / 2 / (1 - HEADROOM)
    with pytest.raises(DoesNotFit):
        found(tight, frozen="as-model", memory_risk=0.5)
    chosen = found(tight, memory_risk=0.5).best.plan
    assert chosen.frozen == "spread" and "frozen weights spread" in str(chosen)
    assert found(64e9, frozen="spread").best.plan.frozen == "spread", "where it is asked for"


def test_a_placement_counts_what_a_spread_teacher_sends() -> None:
    """It ended in a KeyError: the group of all data ranks is no axis of the mesh."""
    for layout in (Layout(dp_replicate=2), Layout(dp_shard=2)):
        context = PricedTask(taught(), cluster(2), 8, 10)
        plans = [example_plan(layout, micro_batch=4, batch=8, frozen=how, zero=1) for how in ("as-model", "spread")]
        (before,), (after,) = (axis_traffic(context, plan) for plan in plans)
        assert after.axis == before.axis == ("dp_replicate" if layout.dp_replicate > 1 else "dp_shard")
        gathered = 4 * LAYERS * EACH / 2
        moved = after.bytes_per_step - before.bytes_per_step
        # ZeRO-1 gathers the teacher once a step either way.
        assert moved == pytest.approx(gathered if layout.dp_replicate > 1 else 0.0, abs=1.0)
        assert "frozen weights" in after.text


def test_what_cannot_be_spread_is_refused_with_the_reason() -> None:
    plan = example_plan(Layout(dp_replicate=2), frozen="spread")
    assert "only goes forward" in str(refusal(plan, profile())) and refusal(plan, taught()) is None
    sequences = dataclasses.replace(plan, layout=Layout(cp=2))
    open_axes = dataclasses.replace(taught(), closed_axes={})
    assert "dp_replicate and dp_shard alone" in str(refusal(sequences, open_axes))


def packed() -> ModelProfile:
    """Return a model of eight blocks of seven frozen layers in four bits each."""
    bits = {"packed_parameters": EACH, "packed_layers": 7, "unpacked_elements": EACH // 7, "unpacks": 2.0,
            "unpacks_again": 1.0}  # fmt: skip
    blocks = [dataclasses.replace(each, **bits) if each.recomputable else each for each in profile().blocks]
    return dataclasses.replace(profile(), blocks=tuple(blocks))


def test_spread_four_bits_rest_in_parts_and_are_gathered_whenever_they_are_unpacked() -> None:
    blocks = sum(each.packed_parameters > 0 for each in packed().blocks)
    whole = example_plan(Layout(dp_replicate=2), micro_batch=4, batch=8, recompute="none")
    spread = dataclasses.replace(whole, frozen="spread")

    def told(plan: object, kind: str) -> dict[str, float]:
        forecast = price(PricedTask(packed(), cluster(2), 8, 10), plan)
        return {term.name: term.value for term in getattr(forecast, kind)}

    bits = "weights in four bits"
    spared = told(whole, "memory")[bits] - told(spread, "memory")[bits]
    assert spared == pytest.approx(0.5 * blocks * EACH / 2 - 0.5 * (EACH // 7)), "half of them, but a gathered layer"
    once = told(spread, "time")["gathering of four bits"]
    moved = 2 * 0.5 * blocks * EACH  # in forward and backward pass, half of it over the link
    waits = 2 * 7 * blocks * 1e-4  # a layer at a time
    assert once == pytest.approx(moved / 2 / 1e9 + 2 * moved / 1e10 + waits, rel=0.01)
    assert "gathering of four bits" not in told(whole, "time")
    again = dataclasses.replace(spread, recompute="full")
    assert told(again, "time")["gathering of four bits"] == pytest.approx(1.5 * once)
    twice = dataclasses.replace(spread, micro_batch=2, accumulation=2)
    assert told(twice, "time")["gathering of four bits"] == pytest.approx(2 * once)


def test_the_planner_spreads_four_bits_where_they_do_not_fit_whole() -> None:
    def found(memory_bytes: float, **constraints: object) -> SearchResult:
        where = cluster(2, memory_bytes=memory_bytes)
        return search(packed(), where, PlanSpec(dp_replicate=2, **constraints), batch_samples=8, steps=10)

    assert found(64e9).best.plan.frozen == "as-model"
    whole, parts = (found(64e9, frozen=how).candidates.values.memory.min() for how in ("as-model", "spread"))
    tight = (whole + parts) / 2 / (1 - HEADROOM)
    with pytest.raises(DoesNotFit):
        found(tight, frozen="as-model", memory_risk=0.5)
    assert found(tight, memory_risk=0.5).best.plan.frozen == "spread"
    with pytest.raises(DoesNotFit, match="frozen weights spread"):  # the nearest of all is told
        found(parts / 2, memory_risk=0.5)
