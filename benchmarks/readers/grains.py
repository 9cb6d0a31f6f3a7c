"""grain: a pipeline of a shuffled map over the memory map, batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain.python as grain
import numpy as np

from readers import ROWS, SEED, Batches, stacked, windows


class Windows:
    """The windows as a source of grain's."""

    def __init__(self, folder: Path) -> None:
        self.rows = windows(folder)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.rows[index]


def _batches(folder: Path, options: grain.ReadOptions) -> Batches:
    data = grain.MapDataset.source(Windows(folder)).seed(SEED).shuffle().repeat()
    return iter(data.to_iter_dataset(options).batch(ROWS, drop_remainder=True, batch_fn=stacked))


def alone(folder: Path) -> Batches:
    """Read in the thread that trains."""
    return _batches(folder, grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def threads(folder: Path) -> Batches:
    """Read ahead as grain does by default: 16 threads, 500 samples."""
    return _batches(folder, grain.ReadOptions())
