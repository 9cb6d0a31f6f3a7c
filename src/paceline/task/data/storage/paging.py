"""Paging: which pages of a large mapped file the system reads from the disk, and those of many rows at once.

The system takes a touched page for the beginning of a pass and reads on from it, up to some megabytes. Of rows at
scattered places nearly all of that is never used, and the next row waits until it is read.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

LARGE_BYTES = 2**30  # of smaller files what is read too much is wanted soon: the whole file is in memory after a while
COLD_SECONDS = 10e-6  # that a row takes: one in memory takes one, and one on a disk fifty or more

Places = npt.NDArray[np.int64]


class ScatteredRows:
    """Rows of a mapped file that are read at scattered places.

    While rows come from the disk, all of them are asked for before the first is touched: the disk then reads them
    beside each other. That costs a call for each row, as much as copying it, so it is not done while they come from
    memory.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        mapped.madvise(mmap.MADV_RANDOM)  # nothing but what is touched
        self._mapped, self.is_cold = mapped, True

    @staticmethod
    def of(tokens: object) -> ScatteredRows | None:
        """Return the rows of an array over a mapped file; None of another one, and of a small file."""
        if not isinstance(tokens, np.ndarray) or tokens.nbytes < LARGE_BYTES:
            return None
        base: Any = tokens
        while isinstance(base, np.ndarray | memoryview):
            base = base.base if isinstance(base, np.ndarray) else base.obj
        return ScatteredRows(base) if isinstance(base, mmap.mmap) else None

    def expect(self, starts: Places, stops: Places) -> None:
        """Say which bytes of the file will be copied next: from each start up to its stop."""
        first = starts // mmap.PAGESIZE * mmap.PAGESIZE
        lengths = np.minimum(stops, len(self._mapped)) - first
        for start, length in zip(first.tolist(), lengths.tolist(), strict=True):
            if length > 0:
                self._mapped.madvise(mmap.MADV_WILLNEED, start, length)

    @contextlib.contextmanager
    def copying(self, rows: int) -> Iterator[None]:
        """Take note of how long it takes to copy so many rows."""
        began = time.perf_counter()
        yield
        self.is_cold = time.perf_counter() - began > COLD_SECONDS * rows
