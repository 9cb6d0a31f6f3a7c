"""What a cold epoch of remote shards fetches: a file system of fsspec that counts what is read of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from paceline.task.data.order.of_source import ids_at
from readers import SEED, SEQ_LEN
from readers.ours import of_shards, stream_of

BLOCK, WINDOW, ROWS = 2048, 4, 64  # windows of 16 MB; the corpus is several of them


class CountedFiles(LocalFileSystem):
    """Local files under counted://, whose reads are counted."""

    protocol = "counted"
    lengths: ClassVar[list[int]] = []  # of requests, made by several threads at once

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        found: bytes = super().cat_file(path, start, end, **options)
        CountedFiles.lengths.append(len(found))
        return found

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(path.removeprefix("counted://")))


def cold_reads(folder: Path) -> dict[str, dict[str, float]]:
    """Return, for an epoch in the order of two levels, bytes fetched over bytes of the shards, and requests.

    The last steps are read by their ids: the stream would begin to fetch the next epoch with them.
    """
    fsspec.register_implementation("counted", CountedFiles, clobber=True)
    size = sum(path.stat().st_size for path in (folder / "shards").glob("*.shard"))
    two_windows = math.ceil(2 * WINDOW * BLOCK * SEQ_LEN * 2)
    found = {}
    for what, limit in (("a cache that holds all", 2 * size), ("a cache of two windows", two_windows)):
        CountedFiles.lengths.clear()
        source = of_shards(
            f"counted://{folder / 'shards'}", shuffle="windowed", shuffle_block=BLOCK, shuffle_window=WINDOW,
            cache_dir=str(folder / what.replace(" ", "-")), cache_limit=limit,
        )  # fmt: skip
        stream, ahead = stream_of(source, ROWS), source.samples - (source.steps_ahead + 1) * ROWS
        seen = [stream.at(position).micro_batches[0].ids for position in range(0, ahead, ROWS)]
        seen.append(ids_at(source, SEED, np.arange(len(seen) * ROWS, source.samples)))
        for at in range(0, len(seen[-1]), ROWS):
            source.read(seen[-1][at : at + ROWS])
        assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(source.samples))
        found[what] = {"amplification": sum(CountedFiles.lengths) / size, "requests": len(CountedFiles.lengths)}
    return found
