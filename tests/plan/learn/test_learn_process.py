"""The Gaussian process against its weight-space view, and what it makes of outliers, kin and strangers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.learn.process import LARGEST_LOG, RUN_NOISE, SHARES, Kinship, fit
from paceline.spec.forecast import Z80

SPREAD = math.log(1.2) / Z80  # what a measured forecast of +-20 % states
SAME = Kinship(True, True, True).value
KIN = {
    "plan": Kinship(True, True, True).value,
    "task": Kinship(True, False, False).value,
    "layout": Kinship(False, True, False).value,
    "machine": Kinship(False, False, False).value,
}


def corrected(residuals, kin, noise=RUN_NOISE, spread=SPREAD):
    """Mean and deviation for a plan of some kin to runs that are all of one plan."""
    count = len(residuals)
    fitted = fit(residuals, [spread] * count, [noise] * count, np.full((count, count), float(SAME)))
    mean, deviation = fitted.posterior(np.full((1, count), float(kin)), np.array([spread]))
    return float(mean[0]), float(deviation[0])


def test_shares_add_up_to_the_forecasts_own_variance():
    assert sum(SHARES.values()) == pytest.approx(1) == pytest.approx(float(SAME))


def test_equals_linear_regression_on_the_factors_it_stands_for():
    # Residual = s x (machine + task + layout + plan effects) + noise, each effect a normal variable: ridge regression
    # over indicator features is the same model, computed over 4 groups of effects instead of over runs.
    rng = np.random.default_rng(3)
    tasks, layouts = rng.integers(0, 3, 12), rng.integers(0, 4, 12)
    plans = tasks * 10 + layouts
    spreads, noise = rng.uniform(0.1, 0.2, 12), np.full(12, 0.2)
    residuals = rng.normal(0, 0.05, 12)  # smaller than their noise: none is an outlier
    flags = [[x == y for y in items] for items in (tasks, layouts, plans) for x in items]
    task, layout, plan = (np.array(flags[i * 12 : (i + 1) * 12]) for i in range(3))
    kin = Kinship(task, layout, plan).value
    fitted = fit(residuals[:11], spreads[:11], noise[:11], kin[:11, :11])
    mean, deviation = fitted.posterior(kin[11:, :11], spreads[11:])

    columns = [np.ones(12)] + [
        (items == value) * 1.0 for items in (tasks, layouts, plans) for value in np.unique(items)
    ]
    names = ["machine"] + [
        name for name, items in (("task", tasks), ("layout", layouts), ("plan", plans)) for _ in np.unique(items)
    ]
    design = spreads[:, None] * np.stack(columns, axis=1)
    precision = np.diag([1 / SHARES[name] for name in names])
    covariance = np.linalg.inv(precision + (design[:11].T / noise[:11] ** 2) @ design[:11])
    weights = covariance @ (design[:11].T @ (residuals[:11] / noise[:11] ** 2))
    assert float(mean[0]) == pytest.approx(float(design[11] @ weights), rel=1e-9)
    variance = float(design[11] @ covariance @ design[11]) + RUN_NOISE**2
    assert float(deviation[0]) == pytest.approx(math.sqrt(variance), rel=1e-9)


def test_the_more_alike_a_plan_is_to_what_ran_the_more_it_is_corrected():
    means = [corrected([0.2], KIN[name])[0] for name in ("machine", "layout", "task", "plan")]
    deviations = [corrected([0.2], KIN[name])[1] for name in ("machine", "layout", "task", "plan")]
    assert 0 < means[0] < means[1] < means[2] < means[3] < 0.2
    assert deviations[0] > deviations[1] > deviations[2] > deviations[3] >= RUN_NOISE
    assert means[3] > 0.8 * 0.2  # one run of the same plan says nearly all


def test_a_run_on_a_busy_machine_counts_for_little_until_others_say_the_same():
    once = corrected([math.log(70)], SAME)[0]
    among = corrected([0.05, 0.06, 0.04, math.log(70)], SAME)[0]
    assert 0 <= once < math.log(1.25)
    assert 0.03 < among < 0.08
    honest = [corrected([math.log(2)] * count, SAME)[0] for count in (1, 2, 4)]
    assert honest[0] < honest[1] < honest[2] < math.log(2) and honest[2] > 0.8 * math.log(2)


def test_surprising_runs_widen_the_interval_and_no_correction_exceeds_its_cap():
    quiet, loud = corrected([0.05] * 3, KIN["task"])[1], corrected([0.6] * 3, KIN["task"])[1]
    assert loud > quiet
    assert corrected([5.0] * 12, SAME, spread=1.0)[0] == LARGEST_LOG


@given(st.floats(-0.5, 0.5), st.integers(1, 5), st.sampled_from(list(KIN)))
def test_a_lasting_error_is_never_made_larger(error, runs, kin):
    mean, _ = corrected([error] * runs, KIN[kin])
    assert abs(error - mean) <= abs(error) + 1e-12


def test_many_plans_at_once_are_the_same_as_one_by_one():
    rng = np.random.default_rng(5)
    fitted = fit([0.1, -0.05, 0.2], [0.15] * 3, [0.03] * 3, np.eye(3) * 0.6 + 0.4)
    kin, spreads = rng.choice([0.35, 0.5, 0.6, 1.0], (1000, 3)), rng.uniform(0.1, 0.3, 1000)
    means, deviations = fitted.posterior(kin, spreads)
    for place in (0, 499, 999):
        mean, deviation = fitted.posterior(kin[place : place + 1], spreads[place : place + 1])
        assert mean[0] == pytest.approx(means[place]) and deviation[0] == pytest.approx(deviations[place])


def test_what_runs_leave_open_between_two_plans_by_hand():
    # One run, of the first plan. The two plans' prior covariance is s^2 [[1, k], [k, 1]], and a run of noise n takes
    # s^4 [1, k] [1, k]' / (s^2 + n^2) away: of the difference s^2 (2 - 2 k) - s^4 (1 - k)^2 / (s^2 + n^2) is left.
    s, n, k = 0.142, RUN_NOISE, 0.6
    one = fit([0.01], [s], [n], np.ones((1, 1)))
    left = s**2 * (2 - 2 * k) - s**4 * (1 - k) ** 2 / (s**2 + n**2)
    assert one.apart(np.array([[1.0], [k]]), np.array([s, s]), k) == pytest.approx(math.sqrt(left), rel=1e-9)
    assert math.sqrt(left) == pytest.approx(0.114, abs=1e-3)
    both = fit([0.01, 0.02], [s, s], [n, n], np.array([[1.0, k], [k, 1.0]]))
    assert both.apart(np.array([[1.0, k], [k, 1.0]]), np.array([s, s]), k) == pytest.approx(0.040, abs=1e-3)
    assert one.apart(np.array([[1.0], [1.0]]), np.array([s, s]), 1.0) == pytest.approx(0.0, abs=1e-9)
