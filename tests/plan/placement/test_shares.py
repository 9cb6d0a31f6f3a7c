"""Shares by speed against every way to share, and what uneven shares do to a gradient."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.placement.shares import share_out, split_by_speed

speeds = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=4)


def end(shares, rates):
    return max(share / rate for share, rate in zip(shares, rates, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), speeds)
def test_shares_end_as_early_as_any(total, rates):
    found = share_out(total, rates)
    every = (rest for rest in itertools.product(range(total + 1), repeat=len(rates)) if sum(rest) == total)
    assert sum(found) == total and min(found) >= 0
    assert end(found, rates) == pytest.approx(min(end(shares, rates) for shares in every))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9), speeds)
def test_stages_end_as_early_as_any(costs, rates):
    if len(costs) < len(rates):
        with pytest.raises(ValueError, match="fewer links"):
            split_by_speed(costs, rates)
        return
    found = split_by_speed(costs, rates)

    def slowest(sizes):
        edges = list(itertools.accumulate(sizes, initial=0))
        return max(sum(costs[a:b]) / rate for (a, b), rate in zip(itertools.pairwise(edges), rates, strict=True))

    every = (
        sizes for sizes in itertools.product(range(1, len(costs) + 1), repeat=len(rates)) if sum(sizes) == len(costs)
    )
    assert sum(found) == len(costs) and min(found) >= 1
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


def test_large_totals_take_no_time_and_stay_in_proportion():
    assert share_out(10**9, [1.0, 3.0]) == (250_000_000, 750_000_000)
    assert share_out(100, [1.0]) == (100,) and share_out(0, [1.0, 2.0]) == (0, 0)


@pytest.mark.parametrize("rates", [[], [1.0, 0.0], [-1.0]])
def test_a_worker_without_speed_is_an_error(rates):
    with pytest.raises(ValueError, match="positive speed"):
        share_out(3, rates)


@given(st.integers(2, 30), st.lists(st.floats(0.1, 9.0), min_size=1, max_size=4), st.integers(0, 99))
def test_uneven_shares_give_the_same_gradient(total, rates, seed):
    """A sum and its weight from every worker, divided once: the mean over the batch, however it was shared out."""
    samples = np.random.default_rng(seed).normal(size=(total, 3))
    edges = list(itertools.accumulate(share_out(total, rates), initial=0))
    sums = [(samples[a:b].sum(axis=0), b - a) for a, b in itertools.pairwise(edges)]
    together = sum(part for part, _ in sums) / sum(weight for _, weight in sums)
    np.testing.assert_allclose(together, samples.mean(axis=0), rtol=1e-12, atol=1e-14)
