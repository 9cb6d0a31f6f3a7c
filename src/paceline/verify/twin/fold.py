"""Data of a twin: token ids modulo its smaller vocabulary, and a random part of the labels masked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.spec.import_paths import is_import_path
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.data.order.of_source import order_of
from paceline.task.data.protocol import Source
from paceline.task.models.layers.loss import IGNORED
from paceline.task.models.sizes import is_named
from paceline.task.objective import next_token
from paceline.task.turns import objective_of

FOLDED = ("tokens", "labels")


class FoldedSource:
    """The samples of another source, with ids modulo a vocabulary; labels that do not count, below zero, stay.

    A whole vocabulary would make the twin's embedding a thousand times larger than the rest of it.
    """

    def __init__(self, source: Source, vocab: int) -> None:
        self._source = source
        self.samples, self.items_per_sample, self.unit = source.samples, source.items_per_sample, source.unit
        self.order = order_of(source)
        self.vocab: int | None = vocab
        self.fingerprint = f"{source.fingerprint} modulo {vocab}"

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the batch of the other source, a dict, with its tokens and labels folded."""
        batch = dict(self._source.read(ids, positions))
        for name in FOLDED:
            batch[name] = torch.where(batch[name] < 0, batch[name], batch[name] % self.vocab)
        return batch


class MaskedSource:
    """The samples of another source with a random part of the labels masked: every row has another number of them.

    Text has none that do not count, so that every row weighs the same, and a mean of means is the mean.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.samples, self.items_per_sample, self.unit = source.samples, source.items_per_sample, source.unit
        self.order = order_of(source)
        self.vocab = source.vocab
        self.fingerprint = f"{source.fingerprint} masked"

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the batch of the other source, a dict; which labels count depends on the sample alone."""
        batch = dict(self._source.read(ids, positions))
        labels = batch["labels"].clone()
        for row, sample in zip(labels, ids, strict=True):
            generator = np.random.default_rng(int(sample))
            kept = generator.random(len(row)) < generator.uniform(0.1, 1.0) ** 2
            counted = np.flatnonzero(row.numpy() >= 0)
            if len(counted):
                kept[counted[generator.integers(len(counted))]] = True  # one at least
            row[~torch.from_numpy(kept)] = IGNORED
        return {**batch, "labels": labels}


def for_twin(source: Source, task: Task, masked: bool = False) -> Source:
    """Return the source as a twin can read it: itself, unless the twin is of a built-in family and has fewer tokens.

    `masked` masks labels where the data and the objective are built in, and so known to allow it.
    """
    model = task.model
    if isinstance(model, ModelSpec) and is_named(model.name) and 0 < model.vocab < (source.vocab or 0):
        source = FoldedSource(source, model.vocab)
    built_in = isinstance(task.data, DataSpec) and not any(is_import_path(part.source) for part in task.data.parts())
    if masked and built_in and objective_of(task, source.unit) is next_token:
        return MaskedSource(source)
    return source
