"""mosaicml-streaming: MDS shards, a sample a row of tokens, shuffled as it does by default."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataset

from readers import ROWS, SEED, SEQ_LEN, Batches, stacked, windows
from readers.torch_loaders import epochs_of


def note() -> str:
    """Return that torchvision, which importing the library needs, is an empty stand-in, where it is one."""
    try:
        is_whole = importlib.util.find_spec("torchvision.ops") is not None
    except ModuleNotFoundError:  # not even a package
        is_whole = False
    return (
        "" if is_whole else "torchvision, which it imports, is an empty stand-in here; nothing that is measured uses it"
    )


def write(folder: Path) -> None:
    """Write the windows as MDS shards, not compressed."""
    with MDSWriter(out=str(folder / "mosaic"), columns={"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}) as writer:
        for row in windows(folder):
            writer.write({"tokens": row.astype(np.uint16)})


def _stacked(rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    return stacked([row["tokens"] for row in rows])


def _loader(folder: Path, workers: int) -> Batches:
    data = StreamingDataset(local=str(folder / "mosaic"), shuffle=True, shuffle_seed=SEED, batch_size=ROWS)
    return epochs_of(torch.utils.data.DataLoader(data, ROWS, num_workers=workers, drop_last=True, collate_fn=_stacked))


def alone(folder: Path) -> Batches:
    """Read in the process that trains."""
    return _loader(folder, 0)


def worker(folder: Path) -> Batches:
    """Read ahead in a process."""
    return _loader(folder, 1)
