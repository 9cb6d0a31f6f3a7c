"""Readers of samples of text that `benchmarks/data.py` compares: Paceline's, torch's, and those of other libraries.

Every reader is `read(folder) -> batches` without an end: {"tokens", "labels"}, int64 [ROWS, SEQ_LEN], in a new order
each epoch. FOLDER/tokens/train.tokens are the tokens, uint16; a library that has a format of its own finds them in it
in FOLDER/PACKAGE, which its `write(folder)` made. A reader runs in a process of its own (`measure.py`), which may be of
another Python: files here import numpy, torch and one library, and Paceline only in `ours.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEQ_LEN, ROWS, SEED, VOCAB = 1024, 16, 7, 32768
BASELINE = "memory map and permutation"
APART = "memory map and permutation, documents apart"

Batches = Iterator[dict[str, torch.Tensor]]
Read = Callable[[Path], Batches]


@dataclass(frozen=True)
class Reader:
    """Where a reader is: a module of this folder and a function in it; the package it needs, and how to import it.

    `of_windows` is False where its samples are not the windows that the memory map gives; `writes` is True where it
    reads a format of its own. `beside` is the reader that gives by plain numpy what it gives, where that is more than
    what the memory map gives.
    """

    module: str
    function: str
    package: str = ""
    imported: str = ""
    of_windows: bool = True
    writes: bool = False
    beside: str = ""

    def is_there(self) -> bool:
        """Return whether this Python has the package."""
        return not self.imported or util.find_spec(self.imported.partition(".")[0]) is not None

    def note(self) -> str:
        """Return what is to be told of the environment that it was measured in; nothing where all is as published."""
        told = getattr(import_module(f"readers.{self.module}"), "note", None)
        return str(told()) if told else ""

    def load(self, name: str) -> Any:
        """Return a function of the reader's module, after importing what it needs."""
        if self.imported:
            import_module(self.imported)
        return getattr(import_module(f"readers.{self.module}"), name)


READERS = {
    BASELINE: Reader("torch_loaders", "memory_map"),
    APART: Reader("torch_loaders", "memory_map_apart"),
    "Paceline": Reader("ours", "windows"),
    "Paceline, read ahead": Reader("ours", "windows_while_busy"),
    "Paceline, read ahead by a thread": Reader("ours", "windows_ahead"),
    "Paceline, order of two levels": Reader("ours", "windows_of_blocks"),
    "Paceline, packed rows": Reader("ours", "packed", of_windows=False),
    "Paceline, packed rows, documents apart": Reader("ours", "packed_apart", of_windows=False, beside=APART),
    "Paceline, mixture of three sources": Reader("ours", "mixed"),
    "Paceline, token shards": Reader("ours", "shards"),
    "Paceline, token shards, read ahead": Reader("ours", "shards_ahead"),
    "torch DataLoader, batched, no worker": Reader("torch_loaders", "data_loader"),
    "torch DataLoader, batched, a worker": Reader("torch_loaders", "data_loader_worker"),
    "StatefulDataLoader, batched, no worker": Reader("stateful", "alone", "torchdata", "torchdata"),
    "StatefulDataLoader, batched, a worker": Reader("stateful", "worker", "torchdata", "torchdata"),
    "Hugging Face datasets, batched, no worker": Reader("huggingface", "alone", "datasets", "datasets", writes=True),
    "Hugging Face datasets, batched, a worker": Reader("huggingface", "worker", "datasets", "datasets", writes=True),
    "litdata, no worker": Reader("lit", "alone", "litdata", "litdata", writes=True),
    "litdata, a worker": Reader("lit", "worker", "litdata", "litdata", writes=True),
    "grain, no thread": Reader("grains", "alone", "grain", "grain.python"),
    "grain, threads": Reader("grains", "threads", "grain", "grain.python"),
    "mosaic streaming, no worker": Reader("mosaic", "alone", "mosaicml-streaming", "streaming", writes=True),
    "mosaic streaming, a worker": Reader("mosaic", "worker", "mosaicml-streaming", "streaming", writes=True),
}


def windows(folder: Path) -> np.ndarray:
    """Return the samples as they lie in the file, mapped: [samples, SEQ_LEN + 1]; each shares a token with the next."""
    tokens = np.memmap(folder / "tokens" / "train.tokens", dtype="<u2", mode="r")
    shape, size = ((len(tokens) - 1) // SEQ_LEN, SEQ_LEN + 1), tokens.itemsize
    return np.lib.stride_tricks.as_strided(tokens, shape, (SEQ_LEN * size, size), writeable=False)


def as_batch(rows: np.ndarray) -> dict[str, torch.Tensor]:
    """Return rows of SEQ_LEN + 1 tokens as tokens and labels."""
    return {
        "tokens": torch.from_numpy(rows[:, :-1].astype(np.int64)),
        "labels": torch.from_numpy(rows[:, 1:].astype(np.int64)),
    }


def stacked(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Return samples of SEQ_LEN + 1 tokens, one by one, as a batch: what a collate function does."""
    return as_batch(np.stack([np.asarray(row) for row in rows]))
