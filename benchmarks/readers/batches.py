"""What global batches of documents leave empty, and how even their ranks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.spec.task import DataSpec
from paceline.task.data.order.bucketed import BucketedOrder
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.packing import pieces_of
from paceline.task.data.source import open_sources
from readers import SEED

BATCH, RANKS = 64, 8


def batches_of_documents(folder: Path, max_bytes: int) -> dict[str, Any]:
    """Return what batches of the built-in corpus leave empty, and how unequal ranks are, over three epochs.

    Rows of packed documents; and whole documents, cut where they are longer than a row, in buckets of about one length.
    """
    found = {}
    for seq_len in (512, 2048):
        data = DataSpec(seq_len=seq_len, rows="packed", max_bytes=max_bytes, cache_dir=str(folder))
        train, _ = open_sources(data, SEED)
        assert isinstance(train, PackedSource)
        filled = np.add.reduceat(train.rows.lengths, train.rows.firsts[:-1])
        loads = filled[ids_at(train, SEED, np.arange(3 * train.samples))]
        found[f"packed rows of {seq_len:,}"] = {"rows": train.samples, "waste": train.waste, **_skew(loads)}
        lengths = pieces_of(train.split.offsets(), seq_len)[1]
        order = BucketedOrder(lengths, BATCH, 2048 * 16)
        loads = lengths[order.ids(SEED, np.arange(3 * len(lengths)))]
        passes = loads[: len(loads) // BATCH * BATCH].reshape(-1, BATCH // RANKS)
        waste = 1 - passes.sum() / (passes.max(1) * passes.shape[1]).sum()
        found[f"documents of at most {seq_len:,} in buckets"] = {"rows": len(lengths), "waste": float(waste),
                                                                 **_skew(loads)}  # fmt: skip
    return found


def _skew(loads: np.ndarray) -> dict[str, float]:
    """Return how many tokens the fullest rank has over the mean."""
    by_rank = loads[: len(loads) // BATCH * BATCH].reshape(-1, RANKS, BATCH // RANKS).sum(2)
    skew = by_rank.max(1) / by_rank.mean(1)
    return {"skew_median": float(np.median(skew)), "skew_95": float(np.quantile(skew, 0.95)),
            "skew_max": float(skew.max())}  # fmt: skip
