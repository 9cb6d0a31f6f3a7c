"""The order by length: each sample once per epoch, hardly any padding, and equal loads for any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, DataError
from paceline.spec.task import DataSpec
from paceline.task.data.order.balanced import balanced
from paceline.task.data.order.bucketed import BucketedOrder
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.source import arranged
from paceline.task.data.sources.mapped import MapSource


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64), st.lists(st.integers(1, 90), min_size=1, max_size=300), st.integers(1, 40), st.data())
def test_each_epoch_holds_each_sample_once_however_it_is_asked(
    seed: int, lengths: list[int], bucket: int, data: st.DataObject
) -> None:
    samples, window = len(lengths), data.draw(st.integers(1, 200))
    positions = np.arange(3 * samples)
    whole = BucketedOrder(np.array(lengths), bucket, window).ids(seed, positions)
    for epoch in whole.reshape(3, samples):
        assert np.array_equal(np.sort(epoch), np.arange(samples))
    again, shuffled = (
        BucketedOrder(np.array(lengths), bucket, window),
        np.random.default_rng(1).permutation(3 * samples),
    )
    assert np.array_equal(again.ids(seed, positions[shuffled]), whole[shuffled])
    assert np.array_equal(np.concatenate([again.ids(seed, part) for part in np.array_split(positions, 5)]), whole)


def lengths_of(kind: str, samples: int = 20_000) -> np.ndarray:
    draws = np.random.default_rng(0)
    if kind == "uniform":
        return draws.integers(1, 4097, samples)
    return np.clip(draws.lognormal(7.3, 0.8, samples), 1, 4096).astype(np.int64)


def test_a_batch_that_two_epochs_share_is_of_one_length() -> None:
    lengths = lengths_of("uniform", 5000)
    rows = lengths[BucketedOrder(lengths, 64, 1024).ids(7, np.arange(20 * 5000 // 64 * 64))].reshape(-1, 64)
    spread = (rows.max(1) - rows.min(1)) / 4096
    shared = np.unique(np.arange(1, 20) * 5000 // 64)  # no epoch but the first and the ninth begins with a batch
    assert spread.max() < 0.2 and np.median(spread[shared[shared < len(rows)]]) < 0.1


@pytest.mark.parametrize("kind", ["uniform", "long tail"])
def test_padding_and_loads(kind: str) -> None:
    lengths, batch = lengths_of(kind), 64
    order = BucketedOrder(lengths, batch, 32_768)
    assert len(lengths) % batch, "epochs end inside a batch"
    rows = lengths[order.ids(7, np.arange(3 * len(lengths) // batch * batch))].reshape(-1, batch)
    at_random = np.tile(lengths, 3)[: rows.size].reshape(-1, batch)
    for micro_batch in (4, 16):
        padded = rows.reshape(len(rows), -1, micro_batch).max(2).sum() * micro_batch
        assert 1 - rows.sum() / padded <= 0.01
        assert 1 - at_random.sum() / (at_random.reshape(len(rows), -1, micro_batch).max(2).sum() * micro_batch) > 0.2
    for ranks in (2, 4, 8):
        loads = rows.reshape(len(rows), ranks, -1).sum(2)
        skew = loads.max(1) / loads.mean(1)
        assert np.median(skew) <= 1.001 and np.quantile(skew, 0.95) <= 1.002 and skew.max() <= 1.02


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 4), st.integers(0, 2**32))
def test_balanced_rows_are_the_rows_and_their_runs_are_even(rows: int, batches: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 1000, (batches, rows))
    order = balanced(lengths)
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(rows), (batches, 1)))
    for batch, found in zip(lengths, order, strict=True):
        assert np.array_equal(balanced(batch[None])[0], found), "a batch is balanced by itself"
        half = rows // 2
        widest = int(np.diff(np.sort(batch)).max(initial=0)) if rows % 2 == 0 else int(batch.max())
        assert abs(int(batch[found[:half]].sum()) - int(batch[found[half:]].sum())) <= widest


def test_batches_of_one_length_do_not_follow_each_other() -> None:
    lengths = lengths_of("uniform")
    means = lengths[BucketedOrder(lengths, 64, 32_768).ids(7, np.arange(19_968))].reshape(-1, 64).mean(1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2


class Words:
    """Samples of 1 to 9 tokens."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 + index % 9,), index)


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def test_a_data_set_that_declares_its_lengths_comes_in_buckets() -> None:
    data = DataSpec(shuffle="bucketed", shuffle_bucket=10, shuffle_block=90, shuffle_window=1)
    source, _ = arranged(data, [(MapSource(Words([1 + number % 9 for number in range(90)]), 7, pad), None)])
    ids = ids_at(source, 7, np.arange(90))
    widths = [source.read(ids[at : at + 10]).shape[1] for at in range(0, 90, 10)]
    assert sorted(widths) == list(range(1, 10)), "each bucket of ten is of one length, and so not padded"
    with pytest.raises(ConfigError, match="lengths are not known"):
        arranged(data, [(MapSource(Words(None), 7, pad), None)])
    with pytest.raises(DataError, match="are not the lengths of its samples"):
        MapSource(Words([1, 2]), 7, pad)
