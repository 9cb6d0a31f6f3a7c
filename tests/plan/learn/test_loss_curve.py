"""The loss that further steps lead to: the first half of a curve foretells the second, and silence where it cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.plan.learn.curve import LEAST_STEPS, ExpectedLoss, expected_loss

STEPS = np.arange(1.0, 4001.0)


def curves(count: int) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Yield (level, losses) of runs of 800 to 4,000 steps; in half of them the noise lasts for several steps."""
    draw = np.random.default_rng(0)
    for number in range(count):
        steps = STEPS[: (800, 2000, 4000)[number % 3]]
        level = draw.uniform(0.5, 3) + draw.uniform(1, 8) * steps ** -draw.uniform(0.1, 0.9)
        noise = draw.normal(0, draw.uniform(0.005, 0.2), len(steps))
        if number % 2:
            noise = np.convolve(noise, 0.5 ** np.arange(8))[: len(steps)]
        yield level, level + noise


def test_the_first_half_of_a_curve_foretells_the_second_within_the_interval() -> None:
    told, within, sizes, held = 0, 0, [], []
    for level, losses in curves(120):
        half = len(losses) // 2
        for share in (0.25, 0.5, 1.0):
            found = expected_loss(STEPS[:half], losses[:half], share * half)
            if found is None:
                continue
            at = int(half * (1 + share)) - 1
            told += 1
            within += found.low <= level[at] <= found.high
            # What the run itself shows there has noise of its own, which the level's interval does not have to hold.
            shown = losses[at - half // 8 : at + 1]
            error = 2 * np.std(shown) / math.sqrt(len(shown))
            held.append(found.low - error <= np.mean(shown) <= found.high + error)
            sizes.append((found.high - found.low) / found.loss)
    assert told > 180, told
    assert within >= 0.95 * told, (within, told)
    assert np.mean(held) >= 0.95, np.mean(held)
    assert np.median(sizes) < 0.06, "an interval that holds everything says nothing"


def test_half_a_curve_is_no_wider_than_its_noise_asks() -> None:
    draw = np.random.default_rng(1)
    level = 2 + 5 * STEPS**-0.4
    quiet, loud = (expected_loss(STEPS[:2000], (level + draw.normal(0, noise, 4000))[:2000], 2000.0)
                   for noise in (0.01, 0.3))  # fmt: skip
    assert quiet is not None and loud is not None
    assert loud.high - loud.low > 3 * (quiet.high - quiet.low)


def test_a_loss_is_foretold_only_where_the_curve_bears_it() -> None:
    steps = STEPS[:1000]
    smooth = 2 + 5 * steps**-0.4 + np.random.default_rng(0).normal(0, 0.05, 1000)
    found = expected_loss(steps, smooth, 1000.0)
    assert found is not None and found.loss == pytest.approx(2 + 5 * 2000**-0.4, rel=0.02)
    assert expected_loss(steps, smooth, 10_000.0) is None, "too far"
    assert expected_loss(steps[: LEAST_STEPS - 1], smooth[: LEAST_STEPS - 1], 50.0) is None, "too short"
    level = 2 + 5 * steps[:LEAST_STEPS] ** -0.4
    assert expected_loss(steps[:LEAST_STEPS], level, 100.0) is not None
    diverging = np.where(steps < 700, smooth, smooth + (steps - 700) / 300)
    assert expected_loss(steps, diverging, 500.0) is None
    dropped = np.where(steps < 850, smooth, smooth - 0.3)  # the learning rate fell
    assert expected_loss(steps, dropped, 500.0) is None
    assert expected_loss(steps, np.full(1000, math.nan), 500.0) is None


def test_it_says_between_what() -> None:
    assert ExpectedLoss(800, 2.106, 2.0831, 2.13).text == "a loss of about 2.11 (2.08 to 2.13)"
