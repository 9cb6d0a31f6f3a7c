"""Anywhere in a training of 10^8 samples: what an order computes and holds there, counted, and epochs that meet."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from paceline.task.data.order import permutation
from paceline.task.data.order.bucketed import BucketedOrder
from paceline.task.data.order.mixture import BLOCK, MixShare, MixtureOrder
from paceline.task.data.order.of_source import FiledOrder, GlobalOrder, Order
from paceline.task.data.order.windowed import WindowedOrder

SAMPLES, ROWS, SEED = 10**8, 64, 5
WINDOW = 32 * ROWS  # samples that a plan of buckets looks at
PLACES = [0, 12_345_678, SAMPLES - ROWS // 2, 3 * SAMPLES - 1, 10**15 + 7]
# Cells that a permutation computes for a batch, at most: cycles are walked on from few of them. A batch may lie in two
# epochs, and so in two windows: of one of two levels their blocks are computed too, and whether each has the short one.
MOST_CELLS = {"filed": 0, "global": 2 * ROWS, "windowed": 2 * (2 * ROWS + 4 * 16), "bucketed": 6 * WINDOW,
              "mixed": 2 * ROWS}  # fmt: skip
MOST_BYTES = 1_000_000  # an eight-hundredth of a permutation of all samples


def lengths_of(samples: int) -> np.ndarray:
    """Return lengths that take no memory, however many they are."""
    return np.broadcast_to(np.array(7, dtype=np.uint16), (samples,))


def mixture(samples: int) -> MixtureOrder:
    """Return a mixture whose weights change in its second epoch."""
    sizes = [samples - samples // 3, samples // 3]
    shares = [MixShare(sizes[0], 3.0, ((samples, 1.0),)), MixShare(sizes[1], 1.0)]
    return MixtureOrder(shares, [GlobalOrder(size) for size in sizes])


KINDS: dict[str, Callable[[int], Order]] = {
    "filed": FiledOrder,
    "global": GlobalOrder,
    "windowed": lambda samples: WindowedOrder(samples, block=min(512, samples), window=16),
    "bucketed": lambda samples: BucketedOrder(lengths_of(samples), bucket=ROWS, window=WINDOW),
    "mixed": mixture,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_costs_the_same_anywhere_and_nothing_grows_with_the_samples(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order opened anew at a place: what it computes for the batch there, and what memory it takes for it."""
    cells, computed = permutation._feistel, [0]

    def counted(index: np.ndarray, keys: np.ndarray, samples: int) -> np.ndarray:
        computed[0] += index.size
        return cells(index, keys, samples)

    monkeypatch.setattr(permutation, "_feistel", counted)
    KINDS[kind](SAMPLES).ids(SEED, np.arange(ROWS))  # what is made once in a process is made
    for place in PLACES:
        computed[0] = 0
        tracemalloc.start()
        ids = KINDS[kind](SAMPLES).ids(SEED, np.arange(place, place + ROWS))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert computed[0] <= MOST_CELLS[kind], f"{computed[0]} cells at {place}"
        assert most <= MOST_BYTES, f"{most} bytes at {place}"
        assert ids.dtype == np.int64 and ids.min() >= 0 and ids.max() < SAMPLES


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixed"])
@pytest.mark.parametrize("samples", [1, 13, 100, 1000])
def test_a_batch_straddles_as_many_epochs_as_it_likes(kind: str, samples: int) -> None:
    """One stream: epochs follow each other without a gap, and a batch larger than the data holds several whole ones."""
    order = KINDS[kind](samples)
    stream = order.ids(SEED, np.arange(7 * samples))
    assert np.array_equal(np.sort(stream.reshape(7, samples), axis=1), np.tile(np.arange(samples), (7, 1)))
    for batch in (max(1, samples // 3), samples + 1, 3 * samples + 2):
        cut = [np.arange(at, min(at + batch, 7 * samples)) for at in range(0, 7 * samples, batch)]
        anew = [KINDS[kind](samples).ids(SEED, positions) for positions in cut]
        assert np.array_equal(np.concatenate(anew), stream)


@pytest.mark.parametrize("batch", [7, 1000, 3 * BLOCK + 1])
def test_batches_of_a_mixture_straddle_the_epochs_of_its_sources(batch: int) -> None:
    """Each source is gone through epoch after epoch, whatever the others' lengths and wherever a batch ends."""
    sizes, blocks = [100, 37], 6
    shares = [MixShare(sizes[0], 3.0), MixShare(sizes[1], 1.0)]

    def opened() -> MixtureOrder:
        return MixtureOrder(shares, [GlobalOrder(size) for size in sizes])

    stream = opened().ids(SEED, np.arange(blocks * BLOCK))
    for at in range(0, blocks * BLOCK, batch * 11):
        positions = np.arange(at, min(at + batch, blocks * BLOCK))
        assert np.array_equal(opened().ids(SEED, positions), stream[positions])
    for first, size in ((0, sizes[0]), (sizes[0], sizes[1])):
        counts = np.bincount(stream[(stream >= first) & (stream < first + size)] - first, minlength=size)
        assert counts.max() - counts.min() <= 1, "after any number of blocks each sample came as often, or once more"
