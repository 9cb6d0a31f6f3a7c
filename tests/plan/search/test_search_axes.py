"""The search over open axes: opening one is all it takes, limits are refused by name, and large spaces stay fast."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import pytest
from plan_examples import cluster, opened, plans_of, profile

from paceline.cluster.resolve import resolve_cluster
from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.cost.bill import busy_share
from paceline.plan.cost.pricing import price, step_seconds
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.feasible import refusals
from paceline.plan.search.found import SearchResult
from paceline.plan.search.search import search
from paceline.plan.search.space import TRIED_RECOMPUTE, micro_batches
from paceline.plan.search.values import TIE_RATIO
from paceline.spec.cluster import ClusterSpec
from paceline.spec.layout import MESH_ORDER, accumulation_for, layouts_over
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.profile import ModelProfile
from paceline.spec.task import ModelSpec
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.decoder import profile_decoder

SHAPE = opened(profile(8, heads=8, kv_heads=4, kv_elements=2e4))
MIXTURE = opened(profile(8, heads=8, kv_heads=4, experts=8, expert_parameters=800_000, routed_elements=1e5))


def found(model: ModelProfile = SHAPE, devices: int = 8, batch: int = 16, **changes: object) -> SearchResult:
    where = changes.pop("where", None) or cluster(devices)
    return search(model, where, PlanSpec(**changes), batch_samples=batch, steps=10)


def llama(name: str, seq_len: int = 8192) -> ModelProfile:
    model = profile_decoder(resolve_decoder(ModelSpec(name), 0, seq_len), seq_len)
    return dataclasses.replace(model, closed_axes={"ep": "no experts"})


def h100(devices: int):
    return resolve_cluster(ClusterSpec(device="h100-sxm", devices=devices))[0]


def test_every_axis_that_is_open_is_tried_and_multiplies_to_the_devices() -> None:
    plans = plans_of(found())
    used = {axis for chosen in plans for axis in MESH_ORDER if getattr(chosen.layout, axis) > 1}
    assert used == set(MESH_ORDER) and all(chosen.layout.devices == 8 for chosen in plans)
    assert all(chosen.layout.ep == 1 for chosen in plans)
    assert {chosen.schedule for chosen in plans if chosen.layout.pp > 1} == {"1f1b", "interleaved", "zero-bubble"}
    assert len(set(plans)) == len(plans)


@pytest.mark.parametrize("axis", ["cp", "tp", "pp"])
def test_opening_one_axis_is_all_it_takes(axis: str) -> None:
    result = found(opened(profile(8), axis))
    used = {a for each in plans_of(result) for a in ("cp", "tp", "pp", "ep") if getattr(each.layout, a) > 1}
    assert used == {axis}
    assert [r.because for r in result.refused].count("no rules") == 3


def test_experts_are_spread_where_there_are_some() -> None:
    spread = {each.layout.ep for each in plans_of(found(MIXTURE))}
    assert spread == {1, 2, 4, 8}


def test_limits_are_refused_once_by_name() -> None:
    result = found(devices=16)
    because = [refusal.because for refusal in result.refused]
    assert because.count("4 key/value heads cannot be shared by tp = 8: it must divide 4") == 1
    assert sum("blocks are fewer than 16 pipeline stages" in text for text in because) == 1
    assert all(each.layout.tp <= 4 and each.layout.pp <= 8 for each in plans_of(result))


def test_a_limit_of_a_whole_layout_is_asked_about_every_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_both(chosen: Plan, model: ModelProfile) -> str | None:
        return "tp and cp do not mix" if min(chosen.layout.tp, chosen.layout.cp) > 1 else None

    monkeypatch.setattr(refusals, "LAYOUT_REFUSALS", (*refusals.LAYOUT_REFUSALS, never_both))
    result = found()
    assert [refusal.because for refusal in result.refused].count("tp and cp do not mix") == 1
    layouts = {each.layout for each in plans_of(result)}
    assert any(x.tp > 1 for x in layouts) and any(x.cp > 1 for x in layouts)
    assert not any(min(x.tp, x.cp) > 1 for x in layouts)


def test_a_pipeline_gets_enough_micro_batches_and_a_split() -> None:
    for chosen in plans_of(found(batch=24)):
        if chosen.layout.pp > 1:
            assert chosen.accumulation >= chosen.layout.pp
            assert sum(chosen.stages) == 8 and len(chosen.stages) == chosen.layout.pp * chosen.virtual_stages
            if chosen.schedule == "interleaved":
                assert chosen.accumulation % (chosen.accumulation // chosen.layout.pp) == 0


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"tp": 2, "pp": 2}, lambda p: p.layout.tp == 2 and p.layout.pp == 2),
        ({"cp": 4}, lambda p: p.layout.cp == 4),
        ({"pp": 2, "schedule": "gpipe"}, lambda p: p.schedule == "gpipe"),
        ({"pp": 4, "schedule": "zero-bubble"}, lambda p: p.schedule == "zero-bubble"),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 4}, lambda p: p.virtual_stages == 4),
        ({"pp": 2, "stages": "5+3", "schedule": "1f1b"}, lambda p: p.stages == (5, 3)),
        ({"cp": 2, "zero": 1, "recompute": "full"}, lambda p: p.zero == 1 or p.layout.state_degree == 1),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "kept",
)
def test_constraints_are_kept(changes: dict, check) -> None:
    result = found(**changes)
    assert result.candidates and all(map(check, plans_of(result)))


def test_what_is_demanded_and_cannot_be_had() -> None:
    with pytest.raises(DoesNotFit, match=r"plan\.tp = 8") as error:
        found(tp=8)
    assert "4 key/value heads" in error.value.because
    with pytest.raises(DoesNotFit, match=r"plan\.ep = 2"):
        found(ep=2)
    with pytest.raises(ConfigError, match=r"plan\.tp = 4 and plan\.pp = 4"):
        found(tp=4, pp=4)
    with pytest.raises(DoesNotFit) as error:
        found(batch=64, pp=8, micro_batch=16)
    assert "do not fill a pipeline of 8 (1f1b); 8 do" in error.value.because


def test_a_model_too_large_for_the_data_axes_is_split() -> None:
    """Over 64 devices its shards fit as they are, over 32 they do not."""
    result = search(llama("llama-70b"), h100(32), PlanSpec(), batch_samples=512, steps=10)
    layout = result.best.plan.layout
    assert max(layout.tp, layout.pp, layout.cp) > 1


def test_small_models_on_one_node_stay_with_the_data_axes() -> None:
    small = profile_decoder(resolve_decoder(ModelSpec("llama-124m", vocab=50_257), 0, 1024), 1024)
    result = search(
        dataclasses.replace(small, closed_axes={"ep": "no experts"}), h100(8), PlanSpec(), batch_samples=512, steps=10
    )
    layout = result.best.plan.layout
    assert layout.tp == layout.pp == layout.cp == 1


def test_tensor_ranks_stay_inside_a_node_at_scale() -> None:
    began = time.process_time()
    result = search(llama("llama-405b"), h100(16_384), PlanSpec(), batch_samples=2048, steps=10)
    layout = result.best.plan.layout
    assert layout.tp == 8 and layout.pp >= 8
    assert result.best.forecast.mfu > 0.2
    assert time.process_time() - began < 10, "an order of magnitude: benchmarks print what it really takes"


def test_no_plan_of_the_space_is_left_out_and_none_is_better() -> None:
    """Every plan is put together and priced alone, by another walk through the space."""
    result = found(devices=4, batch=8)
    context = PricedTask(SHAPE, cluster(4), 8, 10)
    best, number = math.inf, 0
    for layout in layouts_over(4, dict.fromkeys(MESH_ORDER, (1, 2, 4))):
        for (schedule, several), (zero, whole), mode, size in itertools.product(
            (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8), ("zero-bubble", 1)),
            ((1, False), (2, False), (3, False), (3, True)) if layout.state_degree > 1 else ((3, False),),
            TRIED_RECOMPUTE,
            micro_batches(8, layout.data_degree),
        ):
            if layout.pp == 1 and schedule != "1f1b":
                continue
            chosen = Plan(
                layout, zero, size, accumulation_for(8, layout.data_degree, size), 8, mode, "bf16", False, schedule,
                several, context.split(layout.pp * several) if layout.pp > 1 else (), whole_gradients=whole,
            )  # fmt: skip
            # Whole gradients of one micro-batch are nothing new; beside a pipeline they are priced where asked for.
            if whole and (layout.pp > 1 or chosen.accumulation == 1):
                continue
            if refusals.refusal(chosen, SHAPE) is None:
                number += 1
                best = min(best, price(context, chosen).step_seconds.value)
    assert result.best.forecast.step_seconds.value <= best * TIE_RATIO
    assert len(result.candidates) == number
    assert min(c.forecast.step_seconds.value for c in result.candidates) == pytest.approx(best, rel=1e-12)


def test_what_is_listed_is_what_was_ranked() -> None:
    result = found(devices=8, batch=16)
    listed = list(result.candidates)
    assert [each.plan for each in listed] == plans_of(result)
    one, sliced = result.candidates[5], result.candidates[5:6][0]
    assert repr(listed[5]) == repr(one) == repr(sliced), "with NaN for money: since Python 3.13 that is not equal"
    seconds, busy = step_seconds(result.candidates.context, result.candidates.columns)
    assert busy_share(result.best.forecast.time) == pytest.approx(busy[0], rel=1e-12)
    assert [each.forecast.step_seconds.value for each in listed] == pytest.approx(list(seconds), rel=1e-12)


def test_layouts_are_each_there_once() -> None:
    degrees = dict.fromkeys((*MESH_ORDER, "ep"), (1, 2, 4, 8))
    layouts = list(layouts_over(8, degrees))
    assert len(set(layouts)) == len(layouts) and all(layout.devices == 8 for layout in layouts)
    assert sum(layout.ep == 1 for layout in layouts) == 35, "ways to write 2^3 as five ordered factors"
    assert list(layouts_over(6, {"tp": [1, 2]})) == []


@pytest.mark.parametrize(
    ("asked", "because"),
    [({"stages": "4+4"}, "stages of 4, 4 blocks are not 4 stages of the model's 8"),
     ({"virtual_stages": 4}, "the model's 8 blocks are fewer than 16 pipeline stages")],
)  # fmt: skip
def test_stages_that_a_pipeline_cannot_have_are_the_reason(asked: dict[str, object], because: str) -> None:
    """It was that of an axis which nobody had asked for: "the model has no experts to spread"."""
    with pytest.raises(DoesNotFit) as error:
        found(pp=4, **asked)
    assert error.value.because == because


def test_plans_say_what_is_new() -> None:
    from paceline.spec.layout import Layout

    chosen = Plan(Layout(cp=2, pp=2), 3, 1, 4, 8, schedule="interleaved", virtual_stages=2, stages=(1, 2, 2, 1))
    assert "ZeRO-3 · interleaved, 4 stages, blocks 1+2x2+1 · micro-batch 1 x 4" in str(chosen)
