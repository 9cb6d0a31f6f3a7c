"""The search: everything allowed is priced, everything else refused with a reason, and the order keeps the goal."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import cluster, plan, profile

from paceline.cluster.resolve import resolve_cluster
from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.intervals import around
from paceline.plan.cost.memory.usable import HEADROOM
from paceline.plan.cost.pricing import forecast_plan, time_estimate
from paceline.plan.cost.rates import Rates
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.compute import host_starts
from paceline.plan.cost.unknown import COMMUNICATING, DOWNWARDS, LAUNCHING, OPEN, PROGRAM, STARTING, Widths, time_widths
from paceline.plan.explain.headline import sure_percent
from paceline.plan.search.limits import chance_within
from paceline.plan.search.search import search
from paceline.plan.search.space import micro_batches
from paceline.plan.search.values import TIE_RATIO
from paceline.spec.cluster import CalibrationStep, ClusterSpec, Figure
from paceline.spec.forecast import Term
from paceline.spec.layout import Layout
from paceline.spec.plan import PlanSpec


def found(constraints=None, where=None, model=None, batch=64, **changes):
    return search(
        model or profile(), where or cluster(), constraints or PlanSpec(**changes), batch_samples=batch, steps=10
    )


def test_all_layouts_classes_and_modes_are_priced():
    plans = {candidate.plan for candidate in found().candidates}
    assert {chosen.layout for chosen in plans} == {
        Layout(dp_replicate=4),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(dp_shard=4),
    }
    assert {chosen.zero for chosen in plans if chosen.layout.dp_shard > 1} == {1, 2, 3}
    assert {chosen.recompute for chosen in plans} == {"none", "selective", "full"}
    assert len(plans) == len(found().candidates)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.integers(8, 100),
    st.sampled_from(["time", "memory", "money", "energy"]),
    st.sampled_from([1e9, 64e9]),
)
def test_every_candidate_is_sound(devices, batch, goal, memory):
    where = cluster(devices, memory_bytes=memory)
    result = found(PlanSpec(goal=goal), where, batch=batch)
    least = result.candidates.values.expected(goal)
    assert least[0] <= np.min(least) * TIE_RATIO or "in one piece" in result.kept_because
    of = {"time": "step_seconds", "memory": "peak_bytes", "money": "usd", "energy": "kwh"}[goal]
    forecast = [getattr(candidate.forecast, of).value for candidate in result.candidates]
    assert getattr(result.candidates.values, goal) == pytest.approx(forecast)
    for candidate in result.candidates:
        chosen, forecast = candidate.plan, candidate.forecast
        largest = -(-batch // chosen.layout.data_degree)
        assert chosen.layout.devices == devices and chosen.layout.data_degree <= batch
        assert (chosen.accumulation - 1) * chosen.micro_batch < largest <= chosen.accumulation * chosen.micro_batch
        assert forecast.peak_bytes.high <= memory * (1 - HEADROOM)
        for estimate in (forecast.step_seconds, forecast.peak_bytes, forecast.usd, forecast.kwh):
            assert 0 < estimate.low < estimate.value < estimate.high
        assert forecast.step_seconds.value == pytest.approx(sum(term.value for term in forecast.time))
        assert forecast.peak_bytes.value == pytest.approx(sum(term.value for term in forecast.memory))


def test_a_partial_plan_is_a_constraint():
    result = found(dp_shard=2, zero=2, micro_batch=8, recompute="full", precision="fp32")
    assert [str(c.plan) for c in result.candidates] == [
        "dp_replicate=2 dp_shard=2 · ZeRO-2 · micro-batch 8 x 2 accumulation · fp32 · full recompute"
    ]


def test_closed_axes_are_refused_once_each_with_their_reason():
    refused = {str(refusal.plan.layout): refusal.because for refusal in found().refused}
    assert refused["dp_replicate=2 tp=2"] == "no rules"
    assert len(refused) == 4 and all(refused.values()), "tp, pp, cp and ep"
    assert len(found(where=cluster(1)).refused) == 0


def test_a_demanded_closed_axis_names_itself():
    with pytest.raises(DoesNotFit, match=r"plan\.tp = 2") as error:
        found(tp=2)
    assert error.value.because == "no rules" and error.value.exit_code == 3


def test_contradictions_are_config_errors():
    with pytest.raises(ConfigError, match=r"plan\.dp_shard = 3 with 4 device"):
        found(dp_shard=3)
    blocks = tuple(dataclasses.replace(block, recomputable=False) for block in profile().blocks)
    flat = dataclasses.replace(profile(), blocks=blocks)
    with pytest.raises(ConfigError, match="recompute = 'full'"):
        found(model=flat, recompute="full")
    assert {c.plan.recompute for c in found(model=flat).candidates} == {"none"}


def test_what_does_not_fit_is_refused_in_numbers_and_alone_is_an_error():
    tight = cluster(4, memory_bytes=2.2e8)
    result = found(where=tight)
    because = [refusal.because for refusal in result.refused if "usable" in refusal.because]
    assert because and all("MiB" in text or "GiB" in text for text in because)
    with pytest.raises(DoesNotFit, match="none of") as error:
        found(where=cluster(4, memory_bytes=1.1e8))
    assert "the smallest" in error.value.because and error.value.try_


def test_cp_is_taken_where_it_is_demanded_and_open():
    model = dataclasses.replace(profile(), closed_axes={"tp": "no rules"})
    assert {candidate.plan.layout.cp for candidate in found(model=model).candidates} >= {1, 2}
    result = found(PlanSpec(cp=2, cp_method="ring"), model=model)
    layouts = {(c.plan.layout.cp, c.plan.cp_method) for c in result.candidates}
    assert layouts == {(2, "ring")} and "ring attention" in str(result.best.plan)
    assert found(PlanSpec(cp=2, zero=2), model=model).best.plan.zero == 2, "ranks of cp share state"
    with pytest.raises(DoesNotFit, match=r"plan.cp = 2 cannot be had"):
        found(PlanSpec(cp=2))


def test_more_devices_than_samples():
    with pytest.raises(DoesNotFit, match="does not fit"):
        found(batch=3)


def test_a_micro_batch_larger_than_the_part_is_refused():
    with pytest.raises(DoesNotFit) as error:
        found(micro_batch=17)
    assert "16 samples at most" in error.value.because


def test_batch_statistics_leave_one_device_and_one_micro_batch():
    why = "BatchNorm statistics"
    model = dataclasses.replace(
        profile(), closed_axes={**profile().closed_axes, "dp_replicate": why, "dp_shard": why, "accumulation": why}
    )
    result = found(where=cluster(1), model=model, batch=8)
    assert {c.plan.micro_batch for c in result.candidates} == {8}
    assert any(refusal.because == why for refusal in result.refused)
    with pytest.raises(DoesNotFit) as refused:
        found(model=model)
    assert refused.value.because == why, "and not that the model has no experts"
    with pytest.raises(DoesNotFit) as refused:
        found(where=cluster(1), model=model, batch=8, micro_batch=9)
    assert refused.value.because == "a device's part of the batch is 8 samples at most"
    assert "devices" not in refused.value.try_, "one device is what there is"


def test_precision_follows_the_measured_rates():
    assert found().best.plan.precision == "bf16" and "measured" in found().precision_because
    slow = cluster(4)
    rates = {"fp32": ((64, 1e11),), "bf16": ((64, 1e10),)}
    slow = dataclasses.replace(slow, device=dataclasses.replace(slow.device, matmul_flops=rates))
    assert found(where=slow).best.plan.precision == "fp32" and "not faster" in found(where=slow).precision_because
    assert found(precision="fp16").best.plan.precision == "fp16"


def test_bf16_is_for_steps_that_gain_by_it_and_not_for_products_that_do():
    """Rows of 18 tokens trained a tenth slower in bf16: a weight is cast for each of few products."""
    few = profile(matmul_flops=2e6, attention_flops=1e4, moved_elements=1e4)  # a product for each value that is cast
    chosen = found(where=cluster(1), model=few, batch=8)
    assert chosen.best.plan.precision == "fp32" and "in bf16 would take" in chosen.precision_because
    asked = found(where=cluster(1), model=few, batch=8, precision="bf16").best.forecast.step_seconds.value
    assert asked * 1.05 >= chosen.best.forecast.step_seconds.value
    assert found(where=cluster(1), model=few, batch=512).best.plan.precision == "bf16", "each cast is used often enough"
    assert found(where=cluster(1, kind="cuda"), model=few, batch=8).best.plan.precision == "bf16"


def test_convolutions_in_groups_compute_in_fp32_on_a_cpu():
    """Depthwise convolutions of a ConvNeXt made a step three times as long in the bf16 that products are faster in."""
    model = dataclasses.replace(profile(), grouped=("stages.0",))
    chosen = found(model=model)
    assert chosen.best.plan.precision == "fp32" and "stages.0 has convolutions in groups" in chosen.precision_because
    assert found(model=model, precision="bf16").best.plan.precision == "bf16", "a spec may still ask for it"
    assert found(model=model, where=cluster(kind="cuda")).best.plan.precision == "bf16", "an accelerator has kernels"


def test_unknown_figures_still_give_a_plan_and_are_unknown():
    unknown = Figure(math.nan, "unknown")
    base = cluster(2)
    device = dataclasses.replace(
        base.device, matmul_flops={}, matmul_source="unknown", memory_bytes=unknown, attention_flops={}
    )
    result = found(where=dataclasses.replace(base, device=device, price_usd_per_device_hour=unknown))
    forecast = result.best.forecast
    assert math.isnan(forecast.step_seconds.value) and math.isnan(forecast.usd.value) and math.isnan(forecast.mfu)
    assert forecast.peak_bytes.value > 0 and result.best.plan.precision == "fp32"


@given(st.integers(1, 1000), st.integers(1, 16))
def test_micro_batches_are_within_the_part(batch, degree):
    largest = -(-batch // degree)
    choices = micro_batches(batch, degree)
    assert choices[0] == 1 and choices[-1] == largest and len(set(choices)) == len(choices) <= 32
    assert micro_batches(batch, degree, 5) == (5,)


def test_intervals_widen_with_weaker_sources():
    rates = Rates(cluster().device, "fp32")
    of_published = Widths(0.2, 0.4, "")
    by_source = [
        time_estimate((Term("a", 2.0, "", source),), rates, of_published)
        for source in ("measured", "published", "assumed")
    ]
    assert [round(e.high / e.value - 1, 3) for e in by_source] == [0.13, 0.35, 0.6]
    step = CalibrationStep("fp32", 64, 64, 1.0, 0.3, 0, 1e9, 0.0, 0.0, 0)
    probed = Rates(dataclasses.replace(cluster().device, calibration=(step,)), "fp32")
    spread = time_estimate((Term("a", 2.0, "", "measured"),), probed, of_published)
    # Two calls of a second that spread by 15 % to either side: their mean by 0.15 / sqrt(2), beside the model's 13 %.
    assert spread.high / spread.value - 1 == pytest.approx(math.hypot(0.13, 0.15 / math.sqrt(2)))
    small = time_estimate((Term("a", 99.0, "", "measured"), Term("b", 1.0, "", "assumed")), rates, of_published)
    # What nobody measured errs by itself, and all of it together.
    assert small.source == "measured" and small.high / small.value - 1 == pytest.approx(math.hypot(0.99 * 0.13, 0.006))
    both = (Term("a", 3.0, "", "assumed", kind="products"), Term("b", 1.0, "", "assumed", kind="collectives"))
    assert time_estimate(both, rates, of_published).high == pytest.approx(4 * 1.6)
    for estimate in (*by_source, spread, small):
        assert estimate.low95 < estimate.low < estimate.value < estimate.high < estimate.high95


def test_a_step_that_waits_for_links_and_launches_is_less_sure():
    """A fifth for links, a tenth for launches that take half a step by themselves, and what it ran left open."""
    found = Widths(0.18, 0.36, "as known").of_step(0.2, 0.1, 0.5, is_open=True)
    more, tail = math.hypot(0.2 * COMMUNICATING, 0.1 * LAUNCHING, 0.5 * STARTING, OPEN), 1.959964 / 1.281552
    assert found.narrow == pytest.approx(math.hypot(0.18, more)) and found.because == "as known"
    assert found.wide == pytest.approx(math.hypot(0.36, more * tail), rel=1e-6)
    below = (math.hypot(0.18, DOWNWARDS * more), math.hypot(0.36, DOWNWARDS * more * tail))
    assert found.downwards == pytest.approx(below, rel=1e-6), "what is unknown makes steps longer, mostly"
    assert Widths(0.18, 0.36, "").of_step(0.2, 0.1).narrow < found.narrow
    assert Widths(0.18, 0.36, "").of_step(0.0, 0.0) == Widths(0.18, 0.36, "", (0.18, 0.36))


def test_an_interval_may_be_wider_upwards_and_is_told_by_both_ends():
    sure = around(2.0, 0.4, 0.8, "published", (0.2, 0.3))
    assert sure.low == pytest.approx(2 / math.exp(0.2)) and sure.high == pytest.approx(2 * math.exp(0.4))
    assert sure.low95 == pytest.approx(2 / math.exp(0.3)) and sure.high95 == pytest.approx(2 * math.exp(0.8))
    assert sure_percent(sure) == " -18/+49%" and sure_percent(around(2.0, 0.4, 0.8, "published")) == " ±49%"
    saved = around(-2.0, 0.4, 0.8, "assumed", (0.2, 0.3))
    assert saved.low == pytest.approx(-2 * math.exp(0.4)) and saved.high == pytest.approx(-2 / math.exp(0.2))
    assert chance_within(sure, 2 * math.exp(0.4)) == pytest.approx(0.9, abs=1e-3)
    assert chance_within(sure, 2 / math.exp(0.2)) == pytest.approx(0.1, abs=1e-3), "nine in ten take longer"


def test_intervals_of_a_probed_machine_are_of_what_a_step_does():
    """Three quarters computing within 13 %, a quarter communicating within 27 %, and what a mean of 16 calls spreads.

    0.75 x 0.13 = 0.0975 and 0.25 x 0.27 = 0.0675; calls that spread by 20 % to either side leave 5 % in a mean of 16,
    and passes 6 % apart 3 %. Together sqrt(0.0975^2 + 0.0675^2 + 0.05^2 + 0.03^2) = 0.1321. Ten times as long a step
    has less of the calls' spread, and all of the passes'.
    """
    step = CalibrationStep("fp32", 64, 64, 0.1, 0.4, 0, 1e9, 0.0, 0.0, 0, relative_drift=0.06)
    rates = Rates(dataclasses.replace(cluster().device, calibration=(step,)), "fp32")
    terms = (Term("a", 1.2, "", "measured", kind="products"), Term("b", 0.4, "", "measured", kind="collectives"))
    found = time_estimate(terms, rates, Widths(0.2, 0.4, ""))
    half = math.hypot(0.0975, 0.0675, 0.05, 0.03)
    assert found.high / found.value == pytest.approx(1 + half) and half == pytest.approx(0.1321, abs=1e-4)
    assert math.log(found.high95 / found.value) == pytest.approx(1.5 * math.log(1 + half))
    assert rates.spread_of_step(16.0) == pytest.approx(math.hypot(0.2 / math.sqrt(160), 0.03))
    assert rates.spread_of_step(0.01) == pytest.approx(math.hypot(0.2, 0.03))  # no step is surer than one call of it


def test_a_machine_whose_blocks_disagree_is_less_sure_than_the_model():
    """Steps of two sizes that took 1 and 4 times their parts: sqrt(4) - 1 = 100 %, in place of 13 %."""
    steps = tuple(CalibrationStep("fp32", 64, 64, seconds, 0.0, 0, 1e9, 0.0, 0.0, 0) for seconds in (1.0, 4.0))
    rates = Rates(dataclasses.replace(cluster().device, calibration=steps), "fp32")
    assert rates.size_spread == pytest.approx(1.0)
    found = time_estimate((Term("a", 2.0, "", "measured", kind="products"),), rates, Widths(0.2, 0.4, ""))
    assert found.high / found.value == pytest.approx(2.0)


def test_intervals_of_published_devices_are_those_that_left_out_tables_missed():
    where, _ = resolve_cluster(ClusterSpec("h100-sxm", devices=8))
    constants = read_constants()
    chosen = plan(Layout(dp_shard=8), 1, precision="bf16")
    forecast = forecast_plan(profile(), where, chosen, batch_samples=64, steps=1)
    widths = time_widths(constants, where.device.name, "bf16", "Paceline", 8)
    assert widths.narrow == pytest.approx(math.hypot(constants.time_80, PROGRAM)), "nobody measured this program there"
    launches = sum(term.value for term in forecast.time if term.kind == "host") / forecast.step_seconds.value
    waits = sum(term.value for term in forecast.time if term.kind in ("collectives", "sync"))
    links = waits / forecast.step_seconds.value
    starts = host_starts(PricedTask(profile(), where, 64, 1).sheet(chosen)).seconds[0] / forecast.step_seconds.value
    assert launches > 0.5
    of_step = widths.of_step(links, launches, starts)
    more = (COMMUNICATING * links, LAUNCHING * launches, STARTING * starts)
    assert of_step.narrow == pytest.approx(math.hypot(widths.narrow, *more))
    assert of_step.downwards[0] == pytest.approx(math.hypot(constants.time_80, DOWNWARDS * math.hypot(PROGRAM, *more)))
    for estimate, narrow, wide in (
        (forecast.step_seconds, of_step.narrow, of_step.downwards[1]),
        (forecast.peak_bytes, constants.memory_80, constants.memory_95),
    ):
        assert math.log(estimate.high / estimate.value) == pytest.approx(narrow)
        assert math.log(estimate.value / estimate.low95) == pytest.approx(wide)
    for term in (*forecast.time, *forecast.memory):
        assert term.low95 <= term.low <= term.value <= term.high <= term.high95 and term.law and term.formula
    for term in (term for term in forecast.time if term.value):
        assert term.high / term.value > term.value / term.low, "terms, too, are surer downwards"


def test_forecast_of_a_given_plan():
    chosen = plan(Layout(dp_replicate=4), 4)
    forecast = forecast_plan(profile(), cluster(), chosen, batch_samples=64, steps=100)
    assert forecast.run_seconds.value == pytest.approx(100 * forecast.step_seconds.value)
    assert forecast.tokens_per_second == pytest.approx(64 * 256 / forecast.step_seconds.value)
    assert forecast.model_flops_per_step == pytest.approx(3 * 64 * 4 * 2.1e9)
    assert forecast.mfu == pytest.approx(forecast.model_flops_per_step / forecast.step_seconds.value / 4 / 1e11)
