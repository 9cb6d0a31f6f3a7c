"""Intervals of differences hold the truth as often as they say, for noise whose neighbours are alike too."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.observe.compare.noise import Noise, between_runs, block_length, detrended, noise_of, t95

TRIES = 150


def correlated(draw: np.random.Generator, steps: int, correlation: float) -> np.ndarray:
    values = np.empty(steps)
    last = draw.standard_normal()
    for index in range(steps):
        last = correlation * last + math.sqrt(1 - correlation**2) * draw.standard_normal()
        values[index] = last
    return values


@pytest.mark.parametrize(
    ("correlation", "steps"),
    [(0.6, 120), *(pytest.param(*each, marks=pytest.mark.deep) for each in ((0.0, 30), (0.0, 300), (0.8, 500)))],
)  # fmt: skip
def test_an_interval_of_95_percent_holds_the_truth(correlation: float, steps: int) -> None:
    draw = np.random.default_rng(3)
    inside = 0
    for _ in range(TRIES):
        values = 5.0 + correlated(draw, steps, correlation)
        found = noise_of(values)
        assert found is not None
        inside += abs(values.mean() - 5.0) <= found.half_width
    assert inside / TRIES >= 0.88, f"{inside / TRIES:.0%} of the intervals"
    assert inside / TRIES < 1.0 or correlation == 0.8, "an interval that is never wrong is too wide"


def test_neighbours_that_are_alike_make_a_mean_less_sure() -> None:
    draw = np.random.default_rng(5)
    alone, alike = (noise_of(correlated(draw, 400, correlation)) for correlation in (0.0, 0.9))
    assert alone is not None and alike is not None
    assert alike.error > 2 * alone.error and alike.freedom < alone.freedom


def test_a_trend_is_no_noise() -> None:
    draw = np.random.default_rng(7)
    flat = draw.standard_normal(200)
    sloped = flat + np.linspace(0, 50, 200)
    assert np.abs(detrended(sloped) - detrended(flat)).max() < 1e-9
    one, other = noise_of(flat), noise_of(sloped)
    assert one is not None and other is not None and one.error == pytest.approx(other.error)


def test_too_few_values_and_values_that_are_none_tell_nothing() -> None:
    assert noise_of(np.arange(11.0)) is None
    assert noise_of(np.full(100, math.nan)) is None
    constant = noise_of(np.ones(50))
    assert constant is not None and constant.sure(0.0) == 0.5 and constant.sure(1e-9) == 1.0
    assert block_length(np.zeros(40)) == 1


def test_runs_that_differ_by_their_seed_tell_the_noise_between_runs() -> None:
    assert between_runs([[1.0], [2.0]], 0, 1) is None
    found = between_runs([[1.0, 1.2], [2.0], [5.0, 5.2, 5.4]], 0, 1)
    assert found is not None and found.freedom == 3
    assert found.error == pytest.approx(math.sqrt((0.02 + 0.08) / 3 * (1 / 2 + 1)))


def test_student_and_how_sure_a_sign_is() -> None:
    for freedom, exact in ((2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)):
        assert t95(freedom) == pytest.approx(exact, rel=0.02)
    noise = Noise(0.1, 1e9)
    assert noise.sure(noise.half_width) == pytest.approx(0.975, abs=1e-4) and noise.sure(0.0) == 0.5
    assert noise.sure(-0.3) == noise.sure(0.3)
