"""The draw among candidates: every candidate is drawn with its own chance, exactly, and a weighted sum has no bias."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from paceline.task.data.order.chosen import (
    ONE,
    as_mask,
    chances,
    digest_of,
    drawn,
    largest,
    of_mask,
    spread_ratio,
    start_of,
)


def every_draw(units: np.ndarray) -> list[tuple[Fraction, np.ndarray]]:
    """Return all draws that there are, each with its probability: the choice changes only where a chance ends."""
    ends = sorted({0, *(int(end) % ONE for end in np.cumsum(units)), ONE})
    found = []
    for first, after in itertools.pairwise(ends):
        places = drawn(units, first)
        assert np.array_equal(places, drawn(units, after - 1)), "no chance ends between two ends"
        found.append((Fraction(after - first, ONE), places))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_over_all_draws_every_candidate_has_its_chance_and_a_weighted_sum_is_the_whole(seed: int) -> None:
    drawing = np.random.default_rng(seed)
    candidates = int(drawing.integers(2, 24))
    count = int(drawing.integers(1, candidates))
    losses = drawing.exponential(size=candidates) ** int(drawing.integers(0, 6)) * drawing.integers(0, 2, candidates)
    units = chances(losses, count, float(drawing.uniform(0.01, 1.0)))
    assert units.sum() == count * ONE and units.min() > 0 and units.max() <= ONE
    draws = every_draw(units)
    assert sum(chance for chance, _ in draws) == 1
    for place in range(candidates):
        assert sum(chance for chance, places in draws if place in places) == Fraction(int(units[place]), ONE)
    values = [Fraction(int(value)) for value in drawing.integers(-1000, 1000, candidates)]
    estimate = sum(
        chance * sum(values[place] * Fraction(ONE, int(units[place])) for place in places) for chance, places in draws
    )
    assert estimate == sum(values), "exactly, in whole numbers"
    assert all(len(places) == count == len(set(places.tolist())) for _, places in draws)


def test_weights_stay_below_the_inverse_of_the_even_part() -> None:
    losses = np.array([1e9, *[1e-9] * 15])
    for even in (0.1, 0.5, 1.0):
        units = chances(losses, 4, even)
        assert (4 / 16 * ONE / units).max() <= 1 / even * (1 + 1e-9)
    assert np.ptp(chances(losses, 4, 1.0)) <= 1, "an even draw"


def test_a_loss_that_is_no_number_is_drawn_for_certain() -> None:
    units = chances(np.array([1.0, np.nan, 2.0, np.inf, 3.0, 4.0]), 3, 0.2)
    assert units[1] == units[3] == ONE and units.sum() == 3 * ONE
    assert {1, 3} <= set(drawn(units, start_of(7, 0)).tolist())
    assert chances(np.array([np.nan] * 6), 2, 0.2).sum() == 2 * ONE
    assert largest(np.array([1.0, np.nan, 9.0, 9.0, 2.0]), 3).tolist() == [1, 2, 3]


def test_draws_spread_evenly_over_positions_and_follow_from_seed_and_position_alone() -> None:
    assert start_of(2**63 + 7, 64) != start_of(7, 64) == start_of(2**64 + 7, 64)  # any seed of torch's
    starts = np.array([start_of(seed, position) for seed in range(4) for position in range(0, 64_000, 64)])
    counts = np.histogram(starts, bins=16, range=(0, ONE))[0]
    assert counts.sum() == 4000 and counts.min() > 175 and counts.max() < 325
    assert start_of(7, 64) == start_of(7, 64) != start_of(8, 64) != start_of(7, 128)


def test_what_was_chosen_is_read_back_and_its_digest_tells_it_from_others() -> None:
    places = drawn(chances(np.arange(1.0, 14.0), 5, 0.3), start_of(1, 26))
    assert np.array_equal(of_mask(as_mask(places, 13), 13), places) and len(as_mask(places, 13)) == 4
    assert len({digest_of(places), digest_of(places[::-1]), digest_of(places[:-1]), digest_of(places + 1)}) == 4


def test_draws_by_loss_vary_less_than_even_ones_where_losses_differ() -> None:
    """Of gradients as long as the losses, all in one direction: the variance over all draws against that of even ones.

    The ratio that is told takes draws for independent ones, as even draws of as many nearly are.
    """
    losses = np.random.default_rng(3).exponential(size=16) ** 2
    units, even = chances(losses, 4, 0.1), chances(np.ones(16), 4, 1.0)

    def variance(units: np.ndarray) -> float:
        sums = [(float(chance), (losses * ONE / units)[places].sum()) for chance, places in every_draw(units)]
        return sum(chance * (found - losses.sum()) ** 2 for chance, found in sums)

    assert variance(units) < 0.2 * variance(even)
    assert spread_ratio(losses, units, 4) < 0.5 and spread_ratio(losses, even, 4) == pytest.approx(1.0)
