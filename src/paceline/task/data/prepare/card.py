"""The data card: where prepared data are from, how the data were made, and what they are. Every run keeps the card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.task.data.prepare.work import PrepareJob, Receipt
from paceline.task.data.sources.shards.folder import ShardIndex, splits_of
from paceline.task.data.sources.shards.opened import storage_of
from paceline.task.data.sources.tokenizer import Tokenizer
from paceline.task.data.sources.tokens import SPLITS
from paceline.version import __version__

SHARES = (0.05, 0.5, 0.95)


def make_card(
    job: PrepareJob, receipts: Sequence[Receipt], tokenizer: Tokenizer, index: ShardIndex, key: str
) -> dict[str, object]:
    """Return the data card of a folder of shards, to which the jobs of `receipts` have added.

    `index` has the card of the shards that were there before, if any were: their counts are added to these.
    """
    data, before = job.data, index.card
    counts = {"files": job.files, "documents": 0, "bytes": 0, "duplicates_removed": 0, "left_out": 0}
    for each in receipts:
        counts["documents"] += each.documents
        counts["bytes"] += each.bytes
        counts["duplicates_removed"] += each.duplicates
        counts["left_out"] += each.left_out
    first = next((each.left_out_first for each in receipts if each.left_out), "")
    splits = splits_of(str(job.folder), index, storage_of(data))
    lengths = np.concatenate([np.diff(splits[split].offsets()) for split in SPLITS])
    return {
        "source": [*before.get("source", []), data.source],
        "what": job.listing.what,
        **{name: before.get(name, 0) + count for name, count in counts.items()},
        "left_out_first": before.get("left_out_first") or first,
        "tokens": {split: index.tokens(split) for split in SPLITS},
        "tokens_per_document": length_quantiles(lengths),
        "tokenizer": {"name": Path(data.tokenizer).name, "vocab": tokenizer.vocab, "identity": tokenizer.identity},
        "split": {"by": "a hash of each document's text", "validation_fraction": data.validation_fraction},
        "dedup": job.dedup and bool(before.get("dedup", True)),  # of all shards
        "made_by": f"paceline {__version__}",
        "fingerprint": index.fingerprint,
        "parts": job.first + len(receipts),
        "jobs": [*before.get("jobs", []), key],
    }


def length_quantiles(lengths: npt.NDArray[Any]) -> dict[str, float]:
    """Return the shortest, mean and longest length, and those below which a share of the documents lies."""
    if not len(lengths):
        return {}
    found: dict[str, float] = {"shortest": int(lengths.min()), "mean": round(float(lengths.mean()), 2)}
    found |= {f"{share:.0%}": int(np.quantile(lengths, share, method="higher")) for share in SHARES}
    return {**found, "longest": int(lengths.max())}
