"""Hugging Face datasets: an Arrow table of lists of tokens, read by index in batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from readers import Batches, as_batch, windows
from readers.torch_loaders import shuffled

AT_ONCE = 1000


def write(folder: Path) -> None:
    """Write the windows as `save_to_disk` does."""
    rows = windows(folder)
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("uint16"))})

    def samples() -> Any:
        for at in range(0, len(rows), AT_ONCE):
            for row in np.ascontiguousarray(rows[at : at + AT_ONCE]):
                yield {"tokens": row}

    cache = str(folder / "datasets-cache")
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    datasets.Dataset.from_generator(samples, features=features, cache_dir=cache).save_to_disk(folder / "datasets")


class Table:
    """The table as a data set that DataLoader reads in batches."""

    def __init__(self, folder: Path) -> None:
        self.table = datasets.load_from_disk(str(folder / "datasets")).with_format("numpy")

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return as_batch(np.asarray(self.table[indices]["tokens"]))


def alone(folder: Path) -> Batches:
    """Read in the process that trains."""
    return shuffled(Table(folder), 0)


def worker(folder: Path) -> Batches:
    """Read ahead in a process."""
    return shuffled(Table(folder), 1)
