"""Chances from intervals, against the standard library's normal distribution."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.risk.chance import chance_above, margin, normal_tail
from paceline.plan.search.limits import chance_within
from paceline.spec.forecast import Z80, Z95, Estimate

NORMAL = NormalDist()


def test_the_tail_is_the_normal_distributions() -> None:
    at = np.linspace(-8, 8, 1001)
    exact = np.array([0.5 * math.erfc(x / math.sqrt(2)) for x in at])
    assert np.abs(normal_tail(at) - exact).max() < 1.5e-7


def test_the_quantiles_are_the_normal_distributions() -> None:
    assert pytest.approx((NORMAL.inv_cdf(0.9), NORMAL.inv_cdf(0.975)), abs=1e-12) == (Z80, Z95)


def test_intervals_hold_what_they_say() -> None:
    narrow, wide = 0.2, 0.7
    limits = np.exp([narrow, wide, -narrow, -wide, 0.0])
    chances = [float(chance_above(np.array(1.0), limit, narrow, wide)) for limit in limits]
    assert chances == pytest.approx([0.1, 0.025, 0.9, 0.975, 0.5], abs=1e-6)


@given(st.floats(0.02, 1.0), st.floats(0.05, 20.0))
def test_a_wide_interval_that_is_normal_gives_the_log_normal(narrow: float, ratio: float) -> None:
    spread = narrow / Z80
    found = float(chance_above(np.array(1.0), ratio, narrow, spread * Z95))
    assert found == pytest.approx(1 - NORMAL.cdf(math.log(ratio) / spread), abs=1e-6)


@given(st.floats(0.001, 0.5), st.floats(0.02, 0.5), st.floats(1.01, 4.0))
def test_the_margin_is_the_inverse(chance: float, narrow: float, wider: float) -> None:
    ratio = math.exp(margin(chance, narrow, narrow * wider))
    assert float(chance_above(np.array(1.0), ratio, narrow, narrow * wider)) == pytest.approx(chance, abs=2e-6)


def test_what_is_unknown_has_no_chance_and_what_is_certain_no_doubt() -> None:
    values = np.array([math.nan, 1.0, 3.0, 2.0])
    assert chance_above(values, 2.0, 0.0, 0.0) == pytest.approx([0.0, 0.0, 1.0, 0.5], abs=1e-6)
    assert chance_above(values, math.nan, 0.2, 0.4).tolist() == [0.0] * 4


def test_chances_to_keep_a_limit() -> None:
    estimate = Estimate(10.0, 8.0, 12.5, "measured", 7.0, 14.0)
    assert chance_within(estimate, 12.5) == pytest.approx(0.9, abs=1e-6)
    assert chance_within(estimate, 8.0) == pytest.approx(0.1, abs=1e-6)
    assert chance_within(estimate, 25.0, 20.0) == pytest.approx(0.9, abs=1e-6)
    free, never = Estimate(0.0, 0.0, 0.0, "published"), math.inf
    assert chance_within(free, 5.0) == 1 and chance_within(estimate, 1e9, never) == 0
    assert math.isnan(chance_within(estimate, 5.0, math.nan))
    assert math.isnan(chance_within(Estimate(math.nan, math.nan, math.nan, "unknown"), 1.0))
