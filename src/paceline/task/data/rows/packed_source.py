"""PackedSource: rows of whole documents as samples."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.rows.kept_rows import FORMAT, rows_of_split
from paceline.task.data.rows.of_split import SourceOfSplit
from paceline.task.data.rows.packing import WINDOW_PIECES, Ints, PackedRows
from paceline.task.data.sources.tokens import Split

IGNORED = -100  # the label of what is no token
LONG_TOKENS = 128  # of pieces that are as long on average, each is copied by itself


class PackedSource(SourceOfSplit):
    """Sample i is row i: documents, and pieces of those longer than a row, of at most seq_len tokens together.

    What a row does not fill are tokens of 0 whose labels do not count. Without `cross_documents` a batch says which
    document each token is of, and what fills the row is one of its own.
    """

    def __init__(self, split: Split, vocab: int, seq_len: int, cross_documents: bool = True) -> None:
        """Map the split and pack its documents. Raises DataError where it does not hold two tokens."""
        super().__init__(split, vocab, seq_len, cross_documents)
        self._tokens = split.open()
        # A memory map makes an object of its own of each slice; an array over it does not.
        self._mapped = self._tokens.view(np.ndarray) if isinstance(self._tokens, np.ndarray) else None
        self.rows = self._rows_of(split, seq_len)
        self.samples = len(self.rows.firsts) - 1
        if split.tokens < 2 or not self.samples:
            raise DataError(
                f"the {split.name} data do not make a single sample",
                f"they are {split.tokens:,} tokens in {split.documents:,} documents",
                "more text, or validation_fraction = 0",
            )
        named = f"{split.digest} packed {seq_len} {WINDOW_PIECES} {FORMAT}"
        self.fingerprint = hashlib.blake2b(named.encode(), digest_size=16).hexdigest()

    def _rows_of(self, split: Split, seq_len: int) -> PackedRows:
        return rows_of_split(split, seq_len)

    @property
    def waste(self) -> float:
        """The part of all rows that no token fills."""
        return 1 - (self.split.tokens - 1) / (self.samples * self.items_per_sample)

    def read(self, ids: npt.NDArray[Any], positions: npt.NDArray[Any] | None = None) -> Any:
        """Return {"tokens", "labels"}: int64 tensors [rows, seq_len]; and "documents" where they do not mix.

        Positions do not matter.
        """
        import torch

        assert ids.size == 0 or ids.min() >= 0, "a sample id is negative"
        first, last = self.rows.firsts[ids], self.rows.firsts[np.asarray(ids) + 1]
        counts = last - first
        pieces = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        starts, lengths = self.rows.starts[pieces], self.rows.lengths[pieces]
        row = np.repeat(np.arange(len(ids)), counts)
        # Where each piece stands in the flattened rows: after the pieces of its row before it.
        ahead = np.cumsum(lengths) - lengths
        began = ahead[np.cumsum(counts) - counts] if len(counts) else ahead
        at = row * self.items_per_sample + ahead - began[row]
        shape = (len(ids), self.items_per_sample)
        tokens, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        filled = np.bincount(row, lengths, len(ids)).astype(np.int64)
        for short in np.flatnonzero(filled < self.items_per_sample).tolist():
            tokens[short, filled[short] :], labels[short, filled[short] :] = 0, IGNORED
        if self._mapped is not None and lengths.sum() >= LONG_TOKENS * len(lengths):
            self._fill(tokens.reshape(-1), labels.reshape(-1), at, starts, lengths)
        else:
            places = np.repeat(at - ahead, lengths) + np.arange(lengths.sum())
            tokens.reshape(-1)[places], labels.reshape(-1)[places] = self._gathered(starts, lengths)
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if not self.cross_documents:
            documents = np.zeros(shape, dtype=np.int64)  # 0 is what fills the row
            places = np.repeat(at - ahead, lengths) + np.arange(lengths.sum())
            documents.reshape(-1)[places] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            batch["documents"] = torch.from_numpy(documents)
        return batch

    def _fill(self, tokens: Ints, labels: Ints, at: Ints, starts: Ints, lengths: Ints) -> None:
        """Copy pieces to their places one by one: where they are long that is quicker than place by place."""
        assert self._mapped is not None
        for place, start, length in zip(at.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            tokens[place : place + length] = self._mapped[start : start + length]
            labels[place : place + length] = self._mapped[start + 1 : start + 1 + length]

    def _gathered(self, starts: Ints, lengths: Ints) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the tokens of pieces one after the other, and those after each of them: each is read once."""
        more = lengths + 1
        ahead = np.cumsum(more) - more
        found = self._tokens[np.repeat(starts - ahead, more) + np.arange(more.sum())]
        is_token, is_label = np.ones(len(found), dtype=bool), np.ones(len(found), dtype=bool)
        is_token[ahead + lengths], is_label[ahead] = False, False
        return found[is_token], found[is_label]
