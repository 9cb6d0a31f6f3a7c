"""torchdata's StatefulDataLoader over the same windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from readers import ROWS, SEED, Batches
from readers.torch_loaders import Windows, as_it_is, epochs_of


def _loader(folder: Path, workers: int) -> Batches:
    random = torch.Generator().manual_seed(SEED)
    data: Any = Windows(folder)
    return epochs_of(
        StatefulDataLoader(
            data, ROWS, shuffle=True, num_workers=workers, collate_fn=as_it_is, generator=random, drop_last=True
        )
    )


def alone(folder: Path) -> Batches:
    """Read in the process that trains."""
    return _loader(folder, 0)


def worker(folder: Path) -> Batches:
    """Read ahead in a process."""
    return _loader(folder, 1)
