"""The order of samples: a bijection in each epoch, frozen, uniform, and the same however it is asked for."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.task.data.order.permutation import MAX_SAMPLES, keyed, mix64, sample_ids

SIZES = sorted({1, 2, 3, 5, 10, 99, 100, 101, 100_000} | {2**k + d for k in range(2, 13) for d in (-1, 0, 1)})

# Frozen for ever: a change here would reorder the samples of every run there is.
GOLDEN_VECTORS = [
    (7, 0, 10, [7, 6, 2, 9, 3, 5, 1, 4, 8, 0]),
    (7, 30, 10, [9, 6, 3, 1, 7, 0, 2, 4, 8, 5]),
    (7, 0, 3, [0, 1, 2]),
    (0, 0, 5, [3, 2, 1, 0, 4]),
    (123456789, 0, 100_000, [41288, 83875, 77565, 37979]),
    (123456789, 300_000, 100_000, [36952, 65647, 32505, 9591]),
    (2**63 + 5, 0, 2**62, [835105333616431893, 17957394294410965, 1772861926189575073, 40171555571835570]),
]


@pytest.mark.parametrize(("seed", "start", "samples", "expected"), GOLDEN_VECTORS)
def test_golden_vectors(seed: int, start: int, samples: int, expected: list[int]) -> None:
    assert sample_ids(seed, np.arange(start, start + len(expected)), samples).tolist() == expected


def test_mix64_is_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 0, from the generator's reference implementation.
    states = (np.arange(1, 4, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(v) for v in mix64(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


@pytest.mark.parametrize("samples", SIZES)
def test_each_epoch_is_a_bijection(samples: int) -> None:
    for epoch in (0, 1, 12_345):
        ids = sample_ids(7, np.arange(samples, dtype=np.int64) + epoch * samples, samples)
        assert ids.dtype == np.int64
        assert np.array_equal(np.sort(ids), np.arange(samples))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**70), st.integers(1, 5000), st.integers(0, 2**40))
def test_bijection_for_any_seed_size_and_epoch(seed: int, samples: int, epoch: int) -> None:
    ids = sample_ids(seed, np.arange(samples, dtype=np.int64) + epoch * samples, samples)
    assert np.array_equal(np.sort(ids), np.arange(samples))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 10_000), st.data())
def test_the_answer_does_not_depend_on_how_it_is_asked(samples: int, start: int, data: st.DataObject) -> None:
    positions = np.arange(start, start + 300)
    whole = sample_ids(11, positions, samples)
    order = np.array(data.draw(st.permutations(range(300))))
    assert np.array_equal(sample_ids(11, positions[order], samples), whole[order])
    cuts = sorted(data.draw(st.lists(st.integers(0, 300), max_size=5)))
    parts = [sample_ids(11, part, samples) for part in np.split(positions, cuts)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(sample_ids(11, positions.reshape(3, 100), samples), whole.reshape(3, 100))


def test_small_permutations_are_equally_likely() -> None:
    for samples in (2, 3, 4, 5, 6):
        cells = math.factorial(samples)
        ids = sample_ids(1, np.arange(samples * cells * 100), samples).reshape(-1, samples)
        counts = np.array(list(Counter(map(tuple, ids.tolist())).values()))
        assert len(counts) == cells
        # chi-square per degree of freedom; the bound is five standard deviations
        assert ((counts - 100) ** 2 / 100).sum() / (cells - 1) < 1 + 5 * math.sqrt(2 / (cells - 1))


@pytest.mark.parametrize("seed", [0, 7])
def test_order_is_uniform_and_uncorrelated(seed: int) -> None:
    samples = 200_000
    ids = sample_ids(seed, np.arange(samples), samples)
    cells, _, _ = np.histogram2d(np.arange(samples), ids, bins=32)
    expected = samples / 32**2
    chi_square_per_df = ((cells - expected) ** 2 / expected).sum() / 31**2
    assert 1 - 5 * math.sqrt(2) / 31 < chi_square_per_df < 1 + 5 * math.sqrt(2) / 31
    for lag in (1, 2, 16):
        assert abs(np.corrcoef(ids[:-lag], ids[lag:])[0, 1]) < 0.01
    assert abs(np.abs(np.diff(ids)).mean() / samples - 1 / 3) < 0.005


def test_epochs_and_seeds_are_unrelated() -> None:
    samples, epochs = 100, 400
    one = sample_ids(1, np.arange(samples * epochs), samples).reshape(epochs, samples)
    two = sample_ids(2, np.arange(samples * epochs), samples).reshape(epochs, samples)
    # Two unrelated permutations agree in one place on average, with variance one.
    assert abs((one[1:] == one[:-1]).sum(1).mean() - 1) < 5 / math.sqrt(epochs)
    assert abs((one == two).sum(1).mean() - 1) < 5 / math.sqrt(epochs)
    assert len(np.unique(keyed(1, np.arange(1000, dtype=np.uint64)))) == 1000


def test_bounds() -> None:
    assert sample_ids(1, np.array([], dtype=np.int64), 5).shape == (0,)
    assert 0 <= int(sample_ids(1, np.array([2**63 - 1]), MAX_SAMPLES)[0]) < MAX_SAMPLES
    with pytest.raises(ValueError, match="samples must lie"):
        sample_ids(1, np.arange(3), 0)
    with pytest.raises(ValueError, match="positions count from 0"):
        sample_ids(1, np.array([-1]), 5)
