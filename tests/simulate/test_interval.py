"""Young's and Daly's formulas against the numbers Daly prints, the exact mean's own minimum, and simulated runs."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from simulate_examples import HOUR, policy, scenario

from paceline.simulate.engine import simulate_run
from paceline.simulate.interval import daly_interval, expected_time, young_interval


@pytest.mark.parametrize(("mtbf_minutes", "minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_prints_these_optima(mtbf_minutes: float, minutes: float) -> None:
    """Daly 2006, figures 3 to 5: 5 minutes a dump, 10 minutes to restart, 500 hours of work."""
    assert daly_interval(300.0, mtbf_minutes * 60) / 60 == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def test_young_is_the_first_order_of_daly() -> None:
    assert young_interval(300.0, 6 * HOUR) == pytest.approx(math.sqrt(2 * 300 * 6 * HOUR))
    assert daly_interval(1e-3, 1e6) == pytest.approx(young_interval(1e-3, 1e6), rel=1e-4)


def test_where_saving_takes_longer_than_the_time_between_failures_daly_takes_that_time() -> None:
    assert daly_interval(100.0, 50.0) == 50.0
    assert math.isinf(daly_interval(1.0, math.inf))


@pytest.mark.parametrize("mtbf_hours", [0.25, 1.0, 6.0, 24.0])
def test_daly_is_near_the_minimum_of_the_exact_mean(mtbf_hours: float) -> None:
    """The formula's interval costs at most 0.1 % more than the best one, found on a fine grid of equal parts."""
    work, stall, mtbf = 500 * HOUR, 300.0, mtbf_hours * HOUR

    def mean(every: float) -> float:
        return expected_time(work, every, stall, mtbf, 600.0).mean

    best = min(mean(every) for every in np.geomspace(0.1, 10, 400) * daly_interval(stall, mtbf))
    assert mean(daly_interval(stall, mtbf)) <= 1.001 * best


def test_the_mean_is_dalys_but_for_the_dump_after_the_end() -> None:
    work, every, stall, mtbf, recovery = 100 * HOUR, HOUR, 300.0, 6 * HOUR, 600.0
    daly = mtbf * math.exp(recovery / mtbf) * math.expm1((every + stall) / mtbf) * work / every
    last = mtbf * math.exp(recovery / mtbf) * (math.expm1((every + stall) / mtbf) - math.expm1(every / mtbf))
    assert expected_time(work, every, stall, mtbf, recovery).mean == pytest.approx(daly - last, rel=1e-12)


@pytest.mark.parametrize("every_hours", [0.25, 0.95, 3.0])
@pytest.mark.parametrize("mtbf_hours", [2.0, 6.0])
def test_simulated_runs_take_what_the_formula_expects(every_hours: float, mtbf_hours: float) -> None:
    """Mean within four standard errors, spread within a tenth, over 500 runs; failures also strike recoveries."""
    job, saves = scenario(mtbf_hours), policy(every=every_hours * HOUR)
    expected = expected_time(job.work_seconds, saves.every, saves.stall, job.mtbf_seconds, saves.recovery)
    walls = [simulate_run(job, saves, seed=1, index=index).wall_seconds for index in range(500)]
    assert abs(statistics.fmean(walls) - expected.mean) < 4 * math.sqrt(expected.variance / len(walls))
    assert statistics.stdev(walls) == pytest.approx(math.sqrt(expected.variance), rel=0.15)


def test_checkpoints_that_are_safe_later_cost_what_the_formula_says() -> None:
    job, saves = scenario(6.0, work_hours=300.0), policy(every=0.5 * HOUR, stall=10.0, write=900.0)
    walls = [simulate_run(job, saves, seed=2, index=index).wall_seconds for index in range(400)]
    late = expected_time(job.work_seconds, saves.every, saves.stall, job.mtbf_seconds, saves.recovery, saves.write)
    at_once = expected_time(job.work_seconds, saves.every, saves.stall, job.mtbf_seconds, saves.recovery)
    extra = statistics.fmean(walls) - at_once.mean
    assert extra == pytest.approx(late.mean - at_once.mean, rel=0.1)  # of first order in interval / mean time


def test_hopeless_intervals_never_end() -> None:
    assert math.isinf(expected_time(1e9, 1e9, 1.0, 1e3, 10.0).mean)
