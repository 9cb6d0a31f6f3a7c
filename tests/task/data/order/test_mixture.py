"""Mixtures: shares are kept in every stretch, each source is read as if it were alone, and limits end it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.task.data.order.mixture import BLOCK, MixShare, MixtureOrder
from paceline.task.data.order.of_source import GlobalOrder


def mixture(*shares: MixShare) -> MixtureOrder:
    return MixtureOrder(shares, [GlobalOrder(share.samples) for share in shares])


shares = st.lists(
    st.builds(
        MixShare,
        samples=st.integers(1, 500),
        weight=st.floats(0.001, 100),
        changes=st.dictionaries(st.integers(1, 5 * BLOCK), st.floats(0, 10), max_size=3).map(
            lambda found: tuple(sorted(found.items()))
        ),
        most=st.one_of(st.none(), st.integers(1, 3 * BLOCK)),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(shares, st.integers(0, 2**40))
def test_each_source_is_read_at_each_of_its_own_positions_once(parts: list[MixShare], seed: int) -> None:
    order = mixture(*parts)
    length = 6 * BLOCK if order.end is None else min(order.end, 6 * BLOCK)
    which, own = order.places(seed, np.arange(length))
    if length % BLOCK == 0 or length == order.end:
        for number in range(len(parts)):
            assert np.array_equal(np.sort(own[which == number]), np.arange((which == number).sum()))
    cut = length * 2 // 3
    assert order.given(seed, cut) == np.bincount(which[:cut], minlength=len(parts)).tolist()
    for share, count in zip(parts, np.bincount(which, minlength=len(parts)).tolist(), strict=True):
        assert share.most is None or count <= share.most


@settings(max_examples=20, deadline=None)
@given(shares, st.integers(0, 2**30))
def test_a_position_means_the_same_however_it_is_asked(parts: list[MixShare], shuffle: int) -> None:
    order = mixture(*parts)
    length = min(3000, order.end or 3000)
    positions = np.arange(length)
    whole = order.ids(5, positions)
    shuffled = np.random.default_rng(shuffle).permutation(length)
    assert np.array_equal(order.ids(5, positions[shuffled]), whole[shuffled])
    assert np.array_equal(np.concatenate([order.ids(5, part) for part in np.array_split(positions, 7)]), whole)


@pytest.mark.parametrize("batch", [16, 64, 512])
def test_every_batch_has_its_share(batch: int) -> None:
    order = mixture(MixShare(1000, 6.0), MixShare(100, 3.0), MixShare(10, 1.0))
    which, _ = order.places(7, np.arange(12 * BLOCK))
    rows = which[: len(which) // batch * batch].reshape(-1, batch)
    for number, weight in enumerate((0.6, 0.3, 0.1)):
        counts = (rows == number).sum(1)
        assert np.abs(counts - weight * batch).max() <= 4  # at random it would be some sqrt(batch)


def test_another_length_of_a_source_moves_no_other() -> None:
    short, long = mixture(MixShare(100, 2.0), MixShare(70, 1.0)), mixture(MixShare(100, 2.0), MixShare(700, 1.0))
    positions = np.arange(10_000)
    for one, other in zip(short.places(7, positions), long.places(7, positions), strict=True):
        assert np.array_equal(one, other)
    mine = short.places(7, positions)[0] == 0
    assert np.array_equal(short.ids(7, positions)[mine], long.ids(7, positions)[mine])


def test_weights_change_where_they_are_said_to() -> None:
    order = mixture(
        MixShare(100, 1.0, ((2 * BLOCK, 0.0),)), MixShare(100, 0.0, ((2 * BLOCK, 1.0), (4 * BLOCK - 5, 3.0)))
    )
    which, _ = order.places(7, np.arange(6 * BLOCK))
    assert not which[: 2 * BLOCK].any() and which[2 * BLOCK :].all()


def test_a_source_at_its_limit_leaves_its_place_to_the_others() -> None:
    order = mixture(MixShare(1000, 1.0, most=1000), MixShare(50, 1.0))
    which, _ = order.places(7, np.arange(5 * BLOCK))
    assert (which == 0).sum() == 1000 and order.end is None
    both = mixture(MixShare(1000, 1.0, most=1000), MixShare(50, 1.0, most=9000))
    assert both.end == 10_000
    counts = np.bincount(both.places(7, np.arange(10_000))[0])
    assert counts.tolist() == [1000, 9000]
    with pytest.raises(DataError, match="ends after 10,000 samples"):
        both.ids(7, np.array([10_000]))


def test_epochs_of_each_source_hold_each_sample_once() -> None:
    order = mixture(MixShare(BLOCK // 4, 1.0), MixShare(3 * BLOCK // 8, 3.0))
    ids = order.ids(7, np.arange(4 * BLOCK))
    counts = np.bincount(ids)
    assert counts[: BLOCK // 4].tolist() == [4] * (BLOCK // 4)
    assert counts[BLOCK // 4 :].tolist() == [8] * (3 * BLOCK // 8)


def test_nothing_to_read_is_an_error() -> None:
    with pytest.raises(DataError, match="begins with nothing"):
        mixture(MixShare(10, 0.0))
    starts = [mixture(MixShare(9, 1.0), MixShare(9, 1.0)).ids(seed, np.arange(50)).tolist() for seed in range(3)]
    assert all(one != other for one, other in itertools.combinations(starts, 2))


def test_golden_vector() -> None:
    # Frozen for ever: a change here would reorder the samples of every mixture there is.
    order = mixture(MixShare(10, 3.0), MixShare(7, 1.0))
    assert order.ids(7, np.arange(8190, 8200)).tolist() == [6, 10, 6, 1, 3, 5, 16, 2, 7, 13]
