"""litdata: chunks of tokens by its TokensLoader, shuffled as it does by default."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import torch
from litdata.streaming.item_loader import TokensLoader

from readers import ROWS, SEED, SEQ_LEN, Batches, stacked, windows
from readers.torch_loaders import epochs_of

PARTS = 16


def _part(folder: str, part: int) -> Any:
    rows = windows(Path(folder))
    for row in rows[len(rows) * part // PARTS : len(rows) * (part + 1) // PARTS]:
        yield torch.from_numpy(row.astype(np.uint16))


def write(folder: Path) -> None:
    """Write the windows one after the other, in chunks of 64 MB."""
    litdata.optimize(
        partial(_part, str(folder)), list(range(PARTS)), str(folder / "litdata"), chunk_bytes="64MB", num_workers=1,
        item_loader=TokensLoader(), verbose=False, keep_data_ordered=True,
    )  # fmt: skip


def _loader(folder: Path, workers: int) -> Batches:
    data = litdata.StreamingDataset(
        str(folder / "litdata"), item_loader=TokensLoader(SEQ_LEN + 1), shuffle=True, drop_last=True, seed=SEED
    )
    return epochs_of(
        litdata.StreamingDataLoader(data, batch_size=ROWS, num_workers=workers, drop_last=True, collate_fn=stacked)
    )


def alone(folder: Path) -> Batches:
    """Read in the process that trains."""
    return _loader(folder, 0)


def worker(folder: Path) -> Batches:
    """Read ahead in a process."""
    return _loader(folder, 1)
