"""Money, energy and carbon: by hand, in their units, with their intervals, and against published runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_examples import cluster

from paceline.cluster.catalog.power import power_model
from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.bill import amounts, bill, busy_share
from paceline.spec.cluster import ClusterSpec, Figure
from paceline.spec.forecast import Estimate, Term

HOUR = Estimate(3600.0, 3600 / 1.2, 3600 * 1.2, "measured")


def terms(where, run=HOUR, busy=1.0):
    return {term.name: term for term in bill(where, run, busy)}


def test_money_energy_and_carbon_by_hand():
    where = cluster(4, carbon_g_per_kwh=Figure(400.0, "published"))  # $2 and 500 W, measured, per device
    found = terms(where)
    assert found["money"].value == pytest.approx(8.0) and found["money"].unit == "USD"
    assert found["energy"].value == pytest.approx(2.0) and found["energy"].unit == "kWh"
    assert found["carbon"].value == pytest.approx(800.0) and found["carbon"].source == "published"
    assert amounts(where, 3600.0, 1.0) == pytest.approx((8.0, 2.0, 800.0))


def test_a_price_is_a_contract_and_power_adds_its_own_error():
    found = terms(cluster(4))
    assert found["money"].high / found["money"].value == pytest.approx(1.2)
    assert found["energy"].high / found["energy"].value == pytest.approx(
        math.exp(math.hypot(math.log(1.2), math.log(1.1)))
    )
    for term in (found["money"], found["energy"]):
        assert term.low * term.high == pytest.approx(term.value**2)
        assert term.low95 < term.low < term.value < term.high < term.high95
        assert math.log(term.high95 / term.value) == pytest.approx(math.log(term.high / term.value) * 1.529, rel=1e-3)


def test_a_bill_is_as_sure_to_either_side_as_its_run():
    """A run of an hour that may take half as long again, and a tenth less; the power is known to a tenth."""
    found = terms(cluster(4), Estimate(3600.0, 3600 / 1.1, 3600 * 1.5, "published"))
    assert (found["money"].low, found["money"].high) == pytest.approx((8 / 1.1, 12.0))
    down, up = (math.exp(math.hypot(math.log(ratio), math.log(1.1))) for ratio in (1.1, 1.5))
    assert (found["energy"].low, found["energy"].high) == pytest.approx((2 / down, 2 * up))
    assert math.log(8 / found["money"].low95) == pytest.approx(math.log(1.1) * 1.529, rel=1e-3)


def test_what_a_run_is_95_per_cent_sure_of_its_money_is_too():
    """A forecast's tails are longer than a normal distribution's, and money had those of one."""
    found = terms(cluster(4), Estimate(3600.0, 3600 / 1.2, 3600 * 1.5, "published", 3600 / 1.4, 3600 * 2.5))
    assert (found["money"].low95, found["money"].high95) == pytest.approx((8 / 1.4, 20.0))
    assert (found["money"].low, found["money"].high) == pytest.approx((8 / 1.2, 12.0))
    assert math.log(found["energy"].high95 / 2) == pytest.approx(
        math.hypot(math.log(2.5), math.log(1.1) * 1.529), rel=1e-3
    )


def test_what_is_unknown_says_what_to_state():
    nothing = cluster(price_usd_per_device_hour=Figure(math.nan, "unknown", "set the price"))
    found = terms(nothing)
    assert math.isnan(found["money"].value) and found["money"].formula == "set the price"
    assert math.isfinite(found["energy"].value) and found["carbon"].source == "unknown"
    never = terms(cluster(), Estimate(math.nan, math.nan, math.nan, "unknown"))
    assert all(math.isnan(term.value) for term in never.values())


def test_the_building_comes_on_top_where_it_is_stated():
    plain, inside = terms(cluster()), terms(cluster(pue=Figure(1.5, "published")))
    assert inside["energy"].value == pytest.approx(1.5 * plain["energy"].value)
    assert "PUE not stated" in plain["energy"].formula and "PUE 1.5" in inside["energy"].formula
    assert "storage, network" in plain["money"].formula


def test_waiting_draws_less_and_has_the_fitted_interval():
    where, _ = resolve_cluster(ClusterSpec("h100-sxm", 8))
    model, sure = power_model(), Estimate(3600.0, 3600.0, 3600.0, "measured")
    for busy in (1.0, 0.5, 0.0):
        energy = terms(where, sure, busy)["energy"]
        assert energy.value == pytest.approx(8 * 0.7 * model.over_tdp(busy))
        assert energy.high / energy.value == pytest.approx(model.ratio80) and energy.source == "assumed"
        assert energy.high95 / energy.value == pytest.approx(model.ratio95)
    stated, _ = resolve_cluster(ClusterSpec("h100-sxm", 8, watts_per_device=500.0))
    assert terms(stated, sure, 0.0)["energy"].value == pytest.approx(4.0)


def test_busy_time_leaves_out_links_stages_and_the_host():
    time = [Term("reduction", seconds, "", "measured", kind=kind) for kind, seconds in (
        ("products", 3.0), ("update", 1.0), ("sync", 2.0), ("collectives", 1.0), ("bubble", 1.0), ("sends", 0.5),
        ("host", 0.5), ("offload", 0.5), ("allocator", 0.25), ("data", 0.25))]  # fmt: skip
    assert busy_share(time) == pytest.approx(0.4)
    assert busy_share([]) == 1.0 and busy_share([Term("a", math.nan, "", "unknown")]) == 1.0


@given(st.lists(st.tuples(st.floats(1.0, 1e7), st.floats(0.0, 1.0)), min_size=1, max_size=5))
def test_amounts_of_arrays_are_those_of_each(pairs):
    where, _ = resolve_cluster(ClusterSpec("a100-80", 16, region="SE", pue=1.1))
    seconds, busy = (np.array(column) for column in zip(*pairs, strict=True))
    together = amounts(where, seconds, busy)
    for index, (one, share) in enumerate(pairs):
        assert [values[index] for values in together] == pytest.approx(list(amounts(where, one, share)))


# What was published of whole runs: device-hours, watts per device or None, PUE, g/kWh or None, USD per device-hour,
# MWh, t CO2e, USD, the factor within which ours lies, and where it is printed.
PUBLISHED = {
    "GPT-3": (3.552e6, "v100-sxm2", None, 1.10, 429.0, None, 1287, 552.1, None, 1.15,
              "Patterson et al. 2021, arXiv:2104.10350, table 4"),
    "T5-11B": (245_760, "tpu-v3", None, 1.12, 545.0, None, 85.7, 46.7, None, 1.15,
               "Patterson et al. 2021, arXiv:2104.10350, table 4"),
    "Meena": (737_280, "tpu-v3", None, 1.09, 415.0, None, 232, 96.4, None, 1.15,
              "Patterson et al. 2021, arXiv:2104.10350, table 4"),
    "BLOOM": (1_082_990, "a100-80", 400.0, 1.0, 57.0, None, 433.196, 24.69, None, 1.01,
              "Luccioni et al. 2022, arXiv:2211.02001: TDP alone"),
    "Llama 3.1": (39.3e6, "h100-sxm", 700.0, 1.08, None, None, None, 11_390, None, 1.05,
                  "Llama 3.1 model card: TDP alone, location-based; ours with the average of the US"),
    "DeepSeek-V3": (2.788e6, "h800", None, 1.0, None, 2.0, None, None, 5.576e6, 1.01,
                    "DeepSeek-AI 2024, arXiv:2412.19437, table 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_are_met_within_the_stated_factor(name):
    hours, device, watts, pue, intensity, price, mwh, tonnes, usd, factor, _ = PUBLISHED[name]
    spec = ClusterSpec(device, 8, pue=pue, region="US", watts_per_device=watts, carbon_g_per_kwh=intensity,
                       price_usd_per_device_hour=price)  # fmt: skip
    where, _ = resolve_cluster(spec)
    dollars, kwh, grams = amounts(where, hours * 3600 / 8, 0.9)
    for ours, theirs in ((kwh / 1e3, mwh), (grams / 1e6, tonnes), (dollars, usd)):
        if theirs is not None:
            assert 1 / factor < ours / theirs < factor
