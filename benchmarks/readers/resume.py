"""How long it takes from opening a source to a batch in the middle of a long training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.task.data.order.bucketed import BucketedOrder
from paceline.task.data.order.mixture import MixShare, MixtureOrder
from paceline.task.data.order.of_source import GlobalOrder
from paceline.task.data.rows.kept_rows import FORMAT
from paceline.task.data.rows.mixed import InOrder, MixedSource
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.sources.tokens import TokenSplit
from readers import ROWS, SEED
from readers.ours import stream_of

ROW_TOKENS = 16  # so many samples fit on a disk: their tokens are a hole in a file
BUCKET, WINDOW = 64, 2048 * 16
POSITIONS = 20
AT_ONCE = 10**6


def resumes(folder: Path, samples: int) -> dict[str, dict[str, float]]:
    """Return seconds from opening to the first batch at places of three epochs of so many samples, by kind."""
    split = _hole(folder / "many", samples)
    kinds: dict[str, Callable[[], Any]] = {
        "plain": lambda: TokenSource(split, 2, ROW_TOKENS),
        "packed": lambda: PackedSource(split, 2, ROW_TOKENS),
        "bucketed": lambda: _bucketed(folder / "many", split),
        "mixed": lambda: _mixed(split),
    }
    places = np.random.default_rng(SEED).integers(0, 3 * samples, POSITIONS).tolist()
    found = {}
    for kind, opened in kinds.items():
        seconds = []
        for position in places:
            began = time.perf_counter()
            batch = stream_of(opened()).at(position)
            seconds.append(time.perf_counter() - began)
            assert batch.micro_batches[0].data["tokens"].shape == (ROWS, ROW_TOKENS)
        found[kind] = {"median": statistics.median(seconds), "most": max(seconds)}
    return found


def _hole(folder: Path, samples: int) -> TokenSplit:
    """Write tokens of zero, the lengths of samples, and the rows of a packing that has one piece in each."""
    folder.mkdir()
    split = TokenSplit(str(folder), "train", "<u2", samples * ROW_TOKENS + 1, 1, "0" * 32)
    with (folder / "train.tokens").open("wb") as stream:
        stream.truncate(split.tokens * 2)
    with (folder / "train.offsets").open("wb") as stream:
        stream.write(np.array([0, split.tokens], dtype="<i8").tobytes())
    with (folder / f"train.rows-{ROW_TOKENS}-{split.digest[:16]}").open("wb") as rows:
        rows.write(np.array([FORMAT, samples, samples], dtype="<i8").tobytes())
        for scale, count in ((1, samples + 1), (ROW_TOKENS, samples)):
            for at in range(0, count, AT_ONCE):
                rows.write((np.arange(at, min(count, at + AT_ONCE)) * scale).astype("<i8").tobytes())
        for at in range(0, samples, AT_ONCE):
            rows.write(np.full(min(AT_ONCE, samples - at), ROW_TOKENS, dtype="<i8").tobytes())
    random = np.random.default_rng(SEED)
    with (folder / "lengths").open("wb") as lengths:
        for at in range(0, samples, AT_ONCE):
            lengths.write(random.integers(1, ROW_TOKENS, min(AT_ONCE, samples - at), dtype=np.uint16).tobytes())
    return split


def _bucketed(folder: Path, split: TokenSplit) -> InOrder:
    lengths = np.memmap(folder / "lengths", dtype=np.uint16, mode="r")
    return InOrder(TokenSource(split, 2, ROW_TOKENS), BucketedOrder(lengths, BUCKET, WINDOW))


def _mixed(split: TokenSplit) -> MixedSource:
    sources = [TokenSource(split, 2, ROW_TOKENS) for _ in range(3)]
    changes = ((split.tokens // 3, 1.0), (split.tokens // 2, 5.0))
    shares = [
        MixShare(source.samples, weight, changes) for source, weight in zip(sources, (3.0, 1.0, 0.5), strict=True)
    ]
    order = MixtureOrder(shares, [GlobalOrder(source.samples) for source in sources])
    return MixedSource(sources, ["a", "b", "c"], order)
