"""Data of a twin with fewer tokens than the tokenizer has: ids are taken modulo the vocabulary of the twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.task.data.source import Source
from paceline.task.models.sizes import is_named
from paceline.task.task import ModelSpec, Task

FOLDED = ("tokens", "labels")


class FoldedSource:
    """The samples of another source, with ids modulo a vocabulary; labels that do not count, below zero, stay.

    A whole vocabulary would make the twin's embedding a thousand times larger than the rest of it.
    """

    def __init__(self, source: Source, vocab: int) -> None:
        self._source = source
        self.samples, self.items_per_sample, self.unit = source.samples, source.items_per_sample, source.unit
        self.vocab: int | None = vocab
        self.fingerprint = f"{source.fingerprint} modulo {vocab}"

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the batch of the other source, a dict, with its tokens and labels folded."""
        batch = dict(self._source.read(ids, positions))
        for name in FOLDED:
            batch[name] = torch.where(batch[name] < 0, batch[name], batch[name] % self.vocab)
        return batch


def for_twin(source: Source, task: Task) -> Source:
    """Return the source as a twin can read it: itself, unless the twin is of a built-in family and has fewer tokens."""
    model = task.model
    if isinstance(model, ModelSpec) and is_named(model.name) and 0 < model.vocab < (source.vocab or 0):
        return FoldedSource(source, model.vocab)
    return source
