"""The order by length: batches of samples that are about as long as each other, so that little of them is padding.

An epoch is permuted as under the global order and cut into windows. The samples of a window are sorted by length and
cut into buckets, and the buckets come in a permuted order of their own. Within a bucket the lengths are balanced: its
halves, their halves and so on have the same sum, so that ranks have about the same load, however many they are. Large
buckets are dealt by the multiples of the golden ratio instead: every run takes its part from everywhere among them.

Buckets begin at multiples of their size, counted over all epochs: a global batch of that size is a bucket in every
epoch. Where an epoch ends inside one, its last samples and the first ones of the next are both of middling length.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.task.data.order.balanced import MOST_ROWS, balanced
from paceline.task.data.order.permutation import keyed, mix64, permuted, sample_ids

OF_BUCKETS = 0x3C79AC492BA7B653  # sets the keys of buckets apart from those of epochs
GOLDEN_PART = 0.6180339887498949  # 1 / golden ratio
KEPT_WINDOWS = 2  # plans at hand: a batch may straddle two
KEPT_SAMPLES = 1 << 16  # in plans at hand, where windows are small: a batch may hold several epochs

Ints = npt.NDArray[np.int64]


class BucketedOrder:
    """The order of samples of known `lengths` in buckets of `bucket`, planned about `window` samples at a time."""

    is_scattered = True

    def __init__(self, lengths: npt.NDArray[Any], bucket: int, window: int) -> None:
        self._lengths, self.samples = np.asarray(lengths), len(lengths)
        self.bucket, self.window = bucket, max(window // bucket, 1) * bucket
        self._windows = max(1, -(-self.samples // self.window))
        self._kept = max(KEPT_WINDOWS, KEPT_SAMPLES // max(1, min(self.window, self.samples)))
        self._plans: OrderedDict[tuple[int, int, int], Ints] = OrderedDict()

    def ids(self, seed: int, positions: npt.NDArray[np.int64]) -> Ints:
        """Return the sample at each position, in 0..samples-1; every epoch holds each once.

        The work is that of planning a window, however far in the training it is.
        """
        flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
        if flat.size and int(flat.min()) < 0:
            raise ValueError(f"positions count from 0, not {int(flat.min())}")
        epochs, index = np.divmod(flat, self.samples)
        found = np.empty(flat.size, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            of_epoch = np.flatnonzero(epochs == epoch)
            begins = self._begins(epoch)
            windows = np.searchsorted(begins, index[of_epoch], side="right") - 1
            for window in np.unique(windows).tolist():
                here = of_epoch[windows == window]
                found[here] = self._plan(seed, epoch, window, begins)[index[here] - begins[window]]
        return found.reshape(np.shape(positions))

    def _head(self, epoch: int) -> int:
        """Return how many samples of an epoch are of the bucket that the epoch before began."""
        return min(self.samples, -epoch * self.samples % self.bucket)

    def _begins(self, epoch: int) -> Ints:
        """Return where the windows of an epoch begin, and the end of the last: about as many buckets in each."""
        head = self._head(epoch)
        buckets = (self.samples - head) // self.bucket
        begins = head + buckets * np.arange(self._windows + 1, dtype=np.int64) // self._windows * self.bucket
        begins[0], begins[-1] = 0, self.samples
        return begins

    def _plan(self, seed: int, epoch: int, window: int, begins: Ints) -> Ints:
        """Return the samples of a window in their order. What was asked for last is kept: it says the same again."""
        name = (seed, epoch, window)
        plans = self._plans  # read by the thread that reads ahead, and written whole
        plan = plans.get(name)
        if plan is None:
            plan = self._planned(seed, epoch, window, begins)
            plans[name] = plan
            while len(plans) > self._kept:
                plans.popitem(last=False)
        return plan

    def _planned(self, seed: int, epoch: int, window: int, begins: Ints) -> Ints:
        places = np.arange(begins[window], begins[window + 1])
        ids = sample_ids(seed, places + epoch * self.samples, self.samples)
        ids = ids[np.argsort(self._lengths[ids], kind="stable")]
        head, ids = _middle(ids, self._head(epoch) if window == 0 else 0)
        tail, ids = _middle(ids, len(ids) % self.bucket)  # no other window than the last has a rest
        buckets = self._even(ids.reshape(-1, self.bucket))
        key = mix64(keyed(seed ^ OF_BUCKETS, np.array([epoch], dtype=np.uint64)) + np.uint64(window))
        if len(buckets):
            buckets = buckets[permuted(key, np.arange(len(buckets), dtype=np.uint64), len(buckets)).astype(np.int64)]
        return np.concatenate([self._even(head[None])[0], buckets.reshape(-1), self._even(tail[None])[0]])

    def _even(self, batches: Ints) -> Ints:
        """Return batches of sorted ids, [batches, rows], in an order whose runs are about equally long."""
        rows = batches.shape[1]
        if rows > MOST_ROWS:
            return batches[:, _dealing(rows)]
        return np.take_along_axis(batches, balanced(self._lengths[batches]), 1)


def _middle(ids: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the `count` ids in the middle, and the others."""
    at = (len(ids) - count) // 2
    return ids[at : at + count], np.delete(ids, slice(at, at + count))


def _dealing(count: int) -> Ints:
    """Return an order of sorted values in which every run takes its part from everywhere among them."""
    drawn = np.arange(count) * GOLDEN_PART % 1.0
    ranks = np.empty(count, dtype=np.int64)
    ranks[np.argsort(drawn, kind="stable")] = np.arange(count)
    return ranks
