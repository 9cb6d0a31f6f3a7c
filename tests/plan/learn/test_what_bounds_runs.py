"""A run teaches of steps that the same decides: what hosts take to start operators says little of large products.

The three numbers are those of one H200 on 2026-11-27, with published figures: llama-3m was forecast to take 29 ms a
step and took 13 ms, in steps so uneven that the run was not trusted; llama-1b, 1.367 s by the formulas, was then
forecast to take 1.051 s, and took 1.215 s.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.pricing import price, time_components
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.learnt import host_shares
from paceline.plan.learn import correct
from paceline.plan.learn.correct import Learnt, _same_bound
from paceline.plan.learn.observation import Observation, machine_key
from paceline.plan.learn.recall import learn
from paceline.spec.cluster import Cluster, ClusterSpec
from paceline.spec.forecast import Forecast
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile
from paceline.task.models.sizes import NAMED_SIZES
from paceline.task.profile.decoder import profile_decoder
from paceline.task.profile.plain import task_key

SMALL_FORECAST, SMALL_MEASURED = 0.0290, 0.0130
UNEVEN = 0.2  # relative standard deviation of steps: a run that tells no plan from another
LARGE_FORECAST, LARGE_MISLED, LARGE_MEASURED = 1.367, 1.051, 1.215


def model(name: str, vocab: int, seq_len: int) -> ModelProfile:
    return profile_decoder(dataclasses.replace(NAMED_SIZES[name], vocab=vocab), seq_len)


def h200() -> Cluster:
    return dataclasses.replace(resolve_cluster(ClusterSpec(device="h200", devices=1))[0], host="node-1")


SMALL, LARGE, HERE = model("llama-3m", 256, 256), model("llama-1b", 128256, 4096), h200()
SMALL_PLAN = Plan(micro_batch=32, batch_samples=32, precision="bf16")
LARGE_PLAN = Plan(micro_batch=16, batch_samples=16, precision="bf16", recompute="selective", compile=True)


def ran(profile: ModelProfile, plan: Plan, seconds: float, spread: float = 0.02) -> Observation:
    return Observation(
        date="2026-11-27T00:00:00+00:00", run="runs/a", machine=machine_key(HERE), name="a", profile=profile,
        optimizer="adamw", plan=plan, devices=1, devices_per_node=1, steps=200, step_seconds=seconds, spread=spread,
    )  # fmt: skip


def learnt(profile: ModelProfile, *runs: Observation, cluster: Cluster = HERE) -> Learnt | None:
    return learn(runs, task_key(profile, "adamw"), lambda one: cluster)


def forecast(profile: ModelProfile, plan: Plan, *runs: Observation) -> Forecast:
    return price(PricedTask(profile, HERE, plan.batch_samples, 1, learnt=learnt(profile, *runs)), plan)


def share(profile: ModelProfile, plan: Plan, cluster: Cluster = HERE) -> float:
    sheet = PricedTask(profile, cluster, plan.batch_samples, 1).sheet(plan)
    return float(host_shares(sheet, time_components(sheet))[0])


def test_the_two_steps_are_what_was_run() -> None:
    assert forecast(SMALL, SMALL_PLAN).step_seconds.value == pytest.approx(SMALL_FORECAST, rel=0.005)
    assert forecast(LARGE, LARGE_PLAN).step_seconds.value == pytest.approx(LARGE_FORECAST, rel=0.005)
    assert share(SMALL, SMALL_PLAN) > 0.95 and share(LARGE, LARGE_PLAN) < 0.05


@pytest.mark.parametrize("spread", [0.02, UNEVEN], ids=["trusted", "uneven"])
def test_a_step_that_the_host_decides_does_not_scale_one_of_large_products(spread: float) -> None:
    run = ran(SMALL, SMALL_PLAN, SMALL_MEASURED, spread)
    found = learnt(LARGE, run)
    assert found is not None and found.runs[0].is_trusted == (spread != UNEVEN)
    after = forecast(LARGE, LARGE_PLAN, run).step_seconds
    assert after.value == pytest.approx(LARGE_FORECAST, rel=0.02)
    assert abs(after.value - LARGE_MEASURED) < abs(LARGE_MISLED - LARGE_MEASURED)
    assert after.low < LARGE_MEASURED < after.high
    assert "1 of them count for little" in forecast(LARGE, LARGE_PLAN, run).time[-1].formula


def test_where_all_steps_are_taken_to_be_alike_the_forecast_is_what_misled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above are of: without likeness the same run gives the number that was told."""
    monkeypatch.setattr(correct, "_same_bound", lambda hosts, others: np.ones((len(hosts), len(others))))
    run = ran(SMALL, SMALL_PLAN, SMALL_MEASURED, UNEVEN)
    assert forecast(LARGE, LARGE_PLAN, run).step_seconds.value == pytest.approx(LARGE_MISLED, rel=0.02)


def test_it_does_teach_of_steps_that_the_host_decides_too() -> None:
    """Of the same plan nearly all; of a large model in pieces so small that the host starts operators all the time."""
    run = ran(SMALL, SMALL_PLAN, SMALL_MEASURED)
    same = forecast(SMALL, SMALL_PLAN, run)
    assert same.step_seconds.value < 0.7 * SMALL_FORECAST and "little" not in same.time[-1].formula
    pieces = dataclasses.replace(LARGE_PLAN, micro_batch=1, accumulation=16, compile=False)
    assert share(LARGE, pieces) > 0.8
    before = forecast(LARGE, pieces).step_seconds.value
    assert forecast(LARGE, pieces, run).step_seconds.value < 0.9 * before


def test_large_products_teach_of_large_products() -> None:
    run = ran(LARGE, LARGE_PLAN, LARGE_MEASURED)
    longer = dataclasses.replace(LARGE_PLAN, micro_batch=8, accumulation=2)
    before = forecast(LARGE, longer).step_seconds.value
    assert LARGE_MEASURED / LARGE_FORECAST < forecast(LARGE, longer, run).step_seconds.value / before < 0.97
    assert forecast(SMALL, SMALL_PLAN, run).step_seconds.value == pytest.approx(SMALL_FORECAST, rel=0.02)


def test_one_processor_starts_operators_and_computes_so_on_a_cpu_nothing_is_told_apart() -> None:
    cpu = dataclasses.replace(HERE, device=dataclasses.replace(HERE.device, kind="cpu"))
    assert share(SMALL, SMALL_PLAN, cpu) == 0.0
    found = learnt(LARGE, ran(SMALL, SMALL_PLAN, SMALL_MEASURED), cluster=cpu)
    assert found is not None and found.runs[0].host_share == 0.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_the_likeness_of_bounds_is_a_covariance(shares: list[float]) -> None:
    alike = _same_bound(np.array(shares), np.array(shares))
    assert np.allclose(np.diag(alike), 1) and np.linalg.eigvalsh(alike).min() > -1e-9
    assert alike.min() >= 0 and math.isclose(float(alike.max()), 1)
