"""The order by length: batches of samples that are about as long as each other, so that little of them is padding.

An epoch is permuted as under the global order and cut into windows. The samples of a window are sorted by length and
cut into buckets, and the buckets come in a permuted order of their own. Within a bucket the lengths are dealt by the
multiples of the golden ratio, so that every run of its samples, whichever rank or micro-batch reads it, holds short and
long ones in equal parts: ranks have about the same load, however many they are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.task.data.order.permutation import keyed, mix64, permuted, sample_ids

OF_BUCKETS = 0x3C79AC492BA7B653  # sets the keys of buckets apart from those of epochs
GOLDEN_PART = 0.6180339887498949  # 1 / golden ratio
KEPT_WINDOWS = 2  # plans at hand: a batch may straddle two

Ints = npt.NDArray[np.int64]


class BucketedOrder:
    """The order of samples of known `lengths` in buckets of `bucket`, planned `window` samples at a time."""

    def __init__(self, lengths: npt.NDArray[Any], bucket: int, window: int) -> None:
        self._lengths, self.samples = np.asarray(lengths), len(lengths)
        self.bucket, self.window = bucket, max(window // bucket, 1) * bucket
        self._plans: OrderedDict[tuple[int, int, int], Ints] = OrderedDict()

    def ids(self, seed: int, positions: npt.NDArray[Any]) -> Ints:
        """Return the sample at each position, in 0..samples-1; every epoch holds each once.

        The work is that of planning a window, however far in the training it is.
        """
        flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
        if flat.size and int(flat.min()) < 0:
            raise ValueError(f"positions count from 0, not {int(flat.min())}")
        epochs, index = np.divmod(flat, self.samples)
        windows, places = np.divmod(index, self.window)
        found = np.empty(flat.size, dtype=np.int64)
        for epoch, window in np.unique(np.stack([epochs, windows]), axis=1).T.tolist():
            here = np.flatnonzero((epochs == epoch) & (windows == window))
            found[here] = self._plan(seed, epoch, window)[places[here]]
        return found.reshape(np.shape(positions))

    def _plan(self, seed: int, epoch: int, window: int) -> Ints:
        """Return the samples of a window in their order. What was asked for last is kept: it says the same again."""
        name = (seed, epoch, window)
        plans = self._plans  # read by the thread that reads ahead, and written whole
        plan = plans.get(name)
        if plan is None:
            plan = self._planned(seed, epoch, window)
            plans[name] = plan
            while len(plans) > KEPT_WINDOWS:
                plans.popitem(last=False)
        return plan

    def _planned(self, seed: int, epoch: int, window: int) -> Ints:
        begin = window * self.window
        places = np.arange(begin, min(begin + self.window, self.samples))
        ids = sample_ids(seed, places + epoch * self.samples, self.samples)
        ids = ids[np.argsort(self._lengths[ids], kind="stable")]
        whole = len(ids) // self.bucket * self.bucket
        buckets = [ids[at : at + self.bucket] for at in range(0, whole, self.bucket)]
        key = mix64(keyed(seed ^ OF_BUCKETS, np.array([epoch], dtype=np.uint64)) + np.uint64(window))
        order = permuted(key, np.arange(len(buckets), dtype=np.uint64), len(buckets)).tolist() if buckets else []
        dealt = [_dealt(buckets[number]) for number in order]
        return np.concatenate([*dealt, _dealt(ids[whole:])])  # the end of an epoch makes no whole bucket


def _dealt(ids: Ints) -> Ints:
    """Return sorted ids so that every run of them takes its part from everywhere in the sorted order."""
    drawn = np.arange(len(ids)) * GOLDEN_PART % 1.0
    ranks = np.empty(len(ids), dtype=np.int64)
    ranks[np.argsort(drawn, kind="stable")] = np.arange(len(ids))
    return ids[ranks]
