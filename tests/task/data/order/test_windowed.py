"""The order by blocks and windows: each sample once per epoch, few blocks at once, and neighbours apart."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.task.data.order.permutation import keyed, permuted, place_of, sample_ids
from paceline.task.data.order.windowed import WindowedOrder

Ints = npt.NDArray[np.int64]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64), st.integers(1, 500), st.integers(1, 70), st.integers(1, 9), st.integers(0, 2**30))
def test_each_epoch_is_a_bijection(seed: int, samples: int, block: int, window: int, epoch: int) -> None:
    order = WindowedOrder(samples, block, window)
    ids = order.ids(seed, np.arange(samples) + epoch * samples)
    assert np.array_equal(np.sort(ids), np.arange(samples))


@pytest.mark.parametrize(("samples", "block", "window"), [(1, 3, 2), (50, 7, 3), (400, 40, 5), (301, 10, 100)])
def test_the_answer_does_not_depend_on_how_it_is_asked(samples: int, block: int, window: int) -> None:
    order, positions = WindowedOrder(samples, block, window), np.arange(77, 377)
    whole, shuffled = order.ids(3, positions), np.random.default_rng(1).permutation(300)
    assert np.array_equal(order.ids(3, positions[shuffled]), whole[shuffled])
    assert np.array_equal(order.ids(3, positions.reshape(3, 100)), whole.reshape(3, 100))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**63), st.integers(1, 3000), st.integers(0, 2**20))
def test_the_inverse_finds_the_place(seed: int, size: int, drawn: int) -> None:
    keys, value = keyed(seed, np.arange(4, dtype=np.uint64)), drawn % size
    assert (permuted(keys, place_of(keys, value, size).astype(np.uint64), size) == value).all()


@pytest.mark.parametrize(("samples", "block", "window"), [(10_000, 64, 4), (9_999, 64, 4), (1_003, 100, 3)])
def test_every_block_is_fetched_once_and_no_more_than_a_window_is_open(samples: int, block: int, window: int) -> None:
    order = WindowedOrder(samples, block, window)
    blocks = order.ids(7, np.arange(samples)) // block
    first = {int(each): int(np.argmax(blocks == each)) for each in np.unique(blocks)}
    last = {each: samples - 1 - int(np.argmax(blocks[::-1] == each)) for each in first}
    spans = [(first[each], last[each]) for each in first]
    most = max(sum(begun <= at <= ended for begun, ended in spans) for at in range(0, samples, 37))
    assert most <= window
    for at in range(0, samples, 97):  # the window that is told holds what is read
        assert int(blocks[at]) in order.window_of(7, at).tolist()


def test_golden_vectors() -> None:
    # Frozen for ever: a change here would reorder the samples of every run there is.
    first = [13, 3, 0, 14, 1, 2, 12, 15, 7, 17, 5, 19, 6, 16, 4, 18, 9, 10, 8, 11]
    assert WindowedOrder(20, 4, 2).ids(7, np.arange(20)).tolist() == first


def near_pairs(ids: Ints, batch: int = 64) -> float:
    """Return how many pairs of a batch are less than 8 samples apart, on average."""
    rows = ids[: len(ids) // batch * batch].reshape(-1, batch)
    pairs = np.triu_indices(batch, 1)
    return float(np.mean([(np.abs(np.subtract.outer(row, row))[pairs] < 8).sum() for row in rows]))


def test_neighbours_meet_as_rarely_as_was_promised() -> None:
    samples = 97_656
    generator, places = np.random.default_rng(0), np.arange(samples)
    uniform = float(np.mean([near_pairs(generator.permutation(samples)) for _ in range(3)]))
    everywhere = float(np.mean([near_pairs(sample_ids(seed, places, samples)) for seed in range(3)]))
    windowed = near_pairs(WindowedOrder(samples, 2048, 16).ids(7, places))
    assert everywhere <= 1.1 * uniform
    assert windowed <= 4 * uniform
    assert windowed == pytest.approx(uniform * samples / (16 * 2048), rel=0.15)  # the price that the module states


def test_within_a_window_the_order_is_uncorrelated() -> None:
    ids = WindowedOrder(65_536, 1024, 16).ids(1, np.arange(16_384))
    for lag in (1, 2, 16):
        assert abs(np.corrcoef(ids[:-lag], ids[lag:])[0, 1]) < 0.03
