"""The memory map that all others are held against, and torch's DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from readers import ROWS, SEED, VOCAB, Batches, as_batch, windows


def memory_map(folder: Path) -> Batches:
    """Yield windows of a memory map in an order that numpy has drawn."""
    rows, random = windows(folder), np.random.default_rng(SEED)
    while True:
        order = random.permutation(len(rows))
        for at in range(0, len(rows) - ROWS + 1, ROWS):
            yield as_batch(rows[order[at : at + ROWS]])


def memory_map_apart(folder: Path) -> Batches:
    """The same, and which document each token is of: how many have ended before it in its row."""
    rows, random = windows(folder), np.random.default_rng(SEED)
    while True:
        order = random.permutation(len(rows))
        for at in range(0, len(rows) - ROWS + 1, ROWS):
            read = rows[order[at : at + ROWS]]
            documents = (read[:, :-1] == VOCAB - 1).cumsum(axis=1, dtype=np.int32)
            yield {**as_batch(read), "documents": torch.from_numpy(documents)}


class Windows:
    """The same windows as a data set that DataLoader reads in batches."""

    def __init__(self, folder: Path) -> None:
        self.rows = windows(folder)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return as_batch(self.rows[indices])


def as_it_is(batch: Any) -> Any:
    """Return what was collated already."""
    return batch


def epochs_of(loader: Any) -> Batches:
    """Yield what a loader gives, epoch after epoch."""
    while True:
        yield from loader


def shuffled(data: Any, workers: int) -> Batches:
    """Read a data set of batches by DataLoader, in a new order each epoch."""
    random = torch.Generator().manual_seed(SEED)
    return epochs_of(
        torch.utils.data.DataLoader(
            data, ROWS, shuffle=True, num_workers=workers, collate_fn=as_it_is, generator=random, drop_last=True
        )
    )


def data_loader(folder: Path) -> Batches:
    """Read in the process that trains."""
    return shuffled(Windows(folder), 0)


def data_loader_worker(folder: Path) -> Batches:
    """Read ahead in a process."""
    return shuffled(Windows(folder), 1)
