"""Data of a twin: token ids modulo its smaller vocabulary, some of the labels masked, and what is rare made often.

Text of a few samples has hardly any of the ids at which a spread vocabulary is cut, and a short row of packed documents
lies within one of them. So some ids of a twin are those beside a cut, and its documents are cut into short ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from paceline.spec.data.labels import IGNORED
from paceline.spec.import_paths import is_import_path
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.data.order.of_source import FiledOrder, GlobalOrder, order_of
from paceline.task.data.protocol import GathersRows, Source
from paceline.task.data.rows.packed import STARTS
from paceline.task.models.layers.packed import document_starts
from paceline.task.models.sizes import is_named
from paceline.task.objective import next_token
from paceline.task.turns import objective_of

FOLDED = ("tokens", "labels")
DOCUMENTS = "documents"
EDGED = 0.5  # of the ids of a twin, that are beside a cut of the vocabulary
SHARDS = (2, 3, 4)  # ranks of a twin that may share a vocabulary
DOCUMENT_TOKENS = 5  # of a twin's packed documents, on average


TwinBatch = dict[str, torch.Tensor]
GatheredTwin = tuple[npt.NDArray[np.int64], object]  # ids of the rows, and what the other source has gathered


class ChangedSource:
    """The samples of a source, changed: a batch is changed by the ids of its samples. Reading stays the source's."""

    def __init__(self, source: Source, changed: str) -> None:
        """`changed` says what is changed, for the fingerprint."""
        self.changes = source
        self.samples, self.items_per_sample, self.unit = source.samples, source.items_per_sample, source.unit
        self.order = order_of(source)
        self.vocab: int | None = source.vocab
        self.fingerprint = f"{source.fingerprint} {changed}"
        self.gathers_rows = bool(getattr(source, "gathers_rows", False))
        self.damaged: dict[int, str] = getattr(source, "damaged", {})  # what the other source leaves out, and why

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> TwinBatch:
        """Return the batch of the other source, a dict, changed."""
        return self.change(dict(self.changes.read(ids, positions)), ids)

    def gather(self, ids: npt.NDArray[np.int64]) -> GatheredTwin:
        """Return what `batch` makes batches of these samples from, where the other source gathers rows."""
        return ids, cast(GathersRows, self.changes).gather(ids)

    def batch(self, gathered: GatheredTwin, first: int, last: int) -> TwinBatch:
        """Return the batch of the gathered rows first..last, changed."""
        ids, rows = gathered
        return self.change(dict(cast(GathersRows, self.changes).batch(rows, first, last)), ids[first:last])

    def change(self, batch: TwinBatch, ids: npt.NDArray[np.int64]) -> TwinBatch:
        """Return a batch of the samples of these ids as it is to be."""
        raise NotImplementedError


def damage_met(source: object) -> list[str]:
    """Return why samples were left out, of all that a twin's source, or one of a mixture's, has read so far."""
    if isinstance(source, ChangedSource):
        return damage_met(source.changes)
    own: dict[int, str] = getattr(source, "damaged", None) or {}
    return [*own.values(), *(because for each in getattr(source, "sources", ()) for because in damage_met(each))]


class FoldedSource(ChangedSource):
    """The samples of another source, with ids modulo a vocabulary; labels that do not count, below zero, stay.

    A whole vocabulary would make the twin's embedding a thousand times larger than the rest of it.
    """

    def __init__(self, source: Source, vocab: int) -> None:
        super().__init__(source, f"modulo {vocab}")
        self.vocab = self._folded = vocab

    def change(self, batch: TwinBatch, ids: npt.NDArray[np.int64]) -> TwinBatch:
        """Return the batch with its tokens and labels folded."""
        for name in FOLDED:
            batch[name] = torch.where(batch[name] < 0, batch[name], batch[name] % self._folded)
        return batch


class MaskedSource(ChangedSource):
    """The samples of another source with a random part of the labels masked: every row has another number of them.

    Text has none that do not count, so that every row weighs the same, and a mean of means is the mean.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source, "masked")

    def change(self, batch: TwinBatch, ids: npt.NDArray[np.int64]) -> TwinBatch:
        """Return the batch with labels masked; which of them count depends on the sample alone."""
        labels = batch["labels"].clone()
        for row, sample in zip(labels, ids, strict=True):
            generator = np.random.default_rng(int(sample))
            kept = generator.random(len(row)) < generator.uniform(0.1, 1.0) ** 2
            counted = np.flatnonzero(row.numpy() >= 0)
            if len(counted):
                kept[counted[generator.integers(len(counted))]] = True  # one at least
            row[~torch.from_numpy(kept)] = IGNORED
        return {**batch, "labels": labels}


class RareSource(ChangedSource):
    """The samples of another source in which rare things are often: ids beside the cuts of a vocabulary, documents.

    Some of the tokens and of the labels that count become the first and the last id of each rank's part of the
    vocabulary, for each number of ranks that a twin has; packed documents are cut anew, at random places.
    """

    def __init__(self, source: Source, vocab: int) -> None:
        """`vocab` is the number of rows that ranks share: no id is as large, in the source or here."""
        super().__init__(source, f"with rare ids of {vocab}")
        self._edges = np.array(edges_of(vocab, min(vocab, source.vocab or vocab)), dtype=np.int64)

    def change(self, batch: TwinBatch, ids: npt.NDArray[np.int64]) -> TwinBatch:
        """Return the batch with rare ids and short documents; what changes in a row depends on its sample alone."""
        for name in (*FOLDED, DOCUMENTS):
            if name in batch:
                batch[name] = batch[name].clone()
        for at, sample in enumerate(ids):
            generator = np.random.default_rng([int(sample), len(self._edges)])
            for name in FOLDED:
                row = batch[name][at].numpy()  # the same memory
                rare = (generator.random(len(row)) < EDGED) & (row >= 0)
                row[rare] = generator.choice(self._edges, int(rare.sum()))
            if DOCUMENTS in batch:
                _cut(batch[DOCUMENTS][at].numpy(), generator)
        if batch.pop(STARTS, None) is not None and (starts := document_starts(batch[DOCUMENTS])) is not None:
            batch[STARTS] = starts
        return batch


class ShortSource:
    """The first samples of another source, so few that epochs end within the steps of a twin. All else is the other's.

    Data are larger than what a twin reads of them, so that it would see the first epoch alone.
    """

    def __init__(self, source: Source, samples: int) -> None:
        self.changes, self.samples = source, samples
        self.order = dataclasses.replace(_plain_order(source), samples=samples)
        self.fingerprint = f"{source.fingerprint} up to {samples}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and pickles ask of an object that is not made yet
            raise AttributeError(name)
        return getattr(self.changes, name)


def shortened(source: Source, samples: int) -> Source:
    """Return the first samples of a source; itself where it has no more, or is read in an order that knows them all."""
    if source.samples <= samples or not isinstance(order_of(source), GlobalOrder | FiledOrder):
        return source
    return cast(Source, ShortSource(source, samples))


def _plain_order(source: Source) -> GlobalOrder | FiledOrder:
    order = order_of(source)
    assert isinstance(order, GlobalOrder | FiledOrder)
    return order


def edges_of(vocab: int, ids: int) -> list[int]:
    """Return the ids below `ids` beside which a vocabulary is cut where ranks share it (vocabulary.py)."""
    starts = {min(vocab, rank * -(-vocab // ranks)) for ranks in SHARDS for rank in range(ranks + 1)}
    return sorted({edge for start in starts for edge in (start - 1, start) if 0 <= edge < ids})


def _cut(documents: npt.NDArray[np.integer], generator: np.random.Generator) -> None:
    """Cut the documents of a row, a number for each token, at further places; 0 is what fills the row."""
    begins = generator.random(len(documents)) < 1 / DOCUMENT_TOKENS
    begins[1:] |= documents[1:] != documents[:-1]
    documents[:] = np.where(documents > 0, np.cumsum(begins) + 1, 0)


def for_twin(source: Source, task: Task, masked: bool = False) -> Source:
    """Return the source as a twin can read it: itself, unless the twin is of a built-in family and has fewer tokens.

    `masked` masks labels and makes rare ids often, where data and objective are built in, and so known to allow it.
    """
    model = task.model
    if isinstance(model, ModelSpec) and is_named(model.name) and 0 < model.vocab < (source.vocab or 0):
        source = FoldedSource(source, model.vocab)
    built_in = isinstance(task.data, DataSpec) and not any(is_import_path(part.source) for part in task.data.parts())
    if masked and built_in and objective_of(task, source.unit) is next_token:
        known = model.vocab if isinstance(model, ModelSpec) and is_named(model.name) else 0
        return RareSource(MaskedSource(source), known or source.vocab or 0)
    return source
