"""PackedSource: rows of whole documents as samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.rows.kept_rows import FORMAT, rows_of_split
from paceline.task.data.rows.of_split import SourceOfSplit, watch_of
from paceline.task.data.rows.packing import WINDOW_PIECES, Ints, PackedRows
from paceline.task.data.sources.shards.tokens_in_files import TokenParts
from paceline.task.data.sources.tokens import Split

IGNORED = -100  # the label of what is no token
LONG_TOKENS = 128  # of pieces that are as long on average, and mapped, each is copied by itself

PackedPiece = tuple[int, int, int, int]  # row, place in it, first token on the disk, tokens


class PackedSource(SourceOfSplit):
    """Sample i is row i: documents, and pieces of those longer than a row, of at most seq_len tokens together.

    What a row does not fill are tokens of 0 whose labels do not count. Without `cross_documents` a batch says which
    document each token is of, and what fills the row is one of its own.
    """

    leaves_out = False  # whether labels of tokens are left out

    def __init__(self, split: Split, vocab: int, seq_len: int, cross_documents: bool = True) -> None:
        """Map the split and pack its documents. Raises DataError where it does not hold two tokens."""
        super().__init__(split, vocab, seq_len, cross_documents)
        self._watch, self._tokens = watch_of(split), split.open()
        # A memory map makes an object of its own of each slice; an array over it does not.
        self._mapped = self._tokens.view(np.ndarray) if isinstance(self._tokens, np.ndarray) else None
        self._filling = np.zeros(seq_len, dtype=self._tokens.dtype)
        rows = self._rows_of(split, seq_len)
        self.rows = PackedRows(np.asarray(rows.firsts), np.asarray(rows.starts), np.asarray(rows.lengths))
        self._runs = self._tokens.runs if isinstance(self._tokens, TokenParts) else self._mapped_runs
        is_near = self._mapped is not None or (isinstance(self._tokens, TokenParts) and self._tokens.is_near)
        self._is_long = is_near and split.tokens >= LONG_TOKENS * len(self.rows.lengths)
        self._looks_at_pieces = not cross_documents or self.leaves_out
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

        assert min(ids.tolist(), default=0) >= 0, "a sample id is negative"
        self._watch()
        tokens, labels, documents = self._laid_in_runs(ids) if self._is_long else self._laid_by_place(ids)
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        return batch if documents is None else {**batch, "documents": torch.from_numpy(documents)}

    def _laid_in_runs(self, ids: npt.NDArray[Any]) -> tuple[Ints, Ints, Ints | None]:
        """Return the rows, piece after piece with what fills them between: where pieces are long that is quickest.

        A row is read with the token after its end. The label of a token is then the next one in the row, but for the
        last of a piece that has another one after it: that is looked up. Of a batch's few pieces numpy's calls would
        take longer than the loop.
        """
        seq_len, firsts = self.items_per_sample, self.rows.firsts
        start_of, length_of = self.rows.starts.item, self.rows.lengths.item
        begins, ends = list[int](), list[int]()  # of runs of tokens on the disk
        pieces: list[PackedPiece] = []
        rows_of_inner, places, after = list[int](), list[int](), list[int]()  # of labels within a row; where they lie
        short: list[tuple[int, int, int]] = []  # row, tokens in it, runs up to its end
        for row, (first, last) in enumerate(zip(firsts[ids].tolist(), firsts[ids + 1].tolist(), strict=True)):
            at = 0
            for piece in range(first, last):
                start, length = start_of(piece), length_of(piece)
                stop = start + length
                if self._looks_at_pieces:
                    pieces.append((row, at, start, length))
                at += length
                begins.append(start)
                if at == seq_len:
                    ends.append(stop + 1)
                else:
                    ends.append(stop)
                    rows_of_inner.append(row)
                    places.append(at - 1)
                    after.append(stop)
            if at < seq_len:
                short.append((row, at, len(ends)))
        runs = self._runs(begins, ends)
        for _, filled, end in reversed(short):  # from the last one, so that places before it stay
            runs.insert(end, self._filling[: seq_len + 1 - filled])
        rows = np.concatenate(runs).reshape(-1, seq_len + 1) if runs else self._filling[:0].reshape(0, seq_len + 1)
        tokens, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        if after:
            labels[rows_of_inner, places] = (
                self._tokens[np.array(after)] if self._mapped is None else self._mapped[after]
            )
        self._leave_out(labels, pieces)
        for row, filled, _ in short:
            labels[row, filled:] = IGNORED
        if self.cross_documents:
            return tokens, labels, None
        documents = np.zeros(tokens.shape, dtype=np.int64)  # 0 is what fills the row
        for number, (row, place, _, length) in enumerate(pieces, start=1):
            documents[row, place : place + length] = number
        return tokens, labels, documents

    def _leave_out(self, labels: Ints, pieces: Sequence[PackedPiece]) -> None:
        """Have labels that do not count be -100. Here all of them count."""

    def _mapped_runs(self, starts: Sequence[int], stops: Sequence[int]) -> list[npt.NDArray[Any]]:
        mapped = self._mapped
        assert mapped is not None
        return [mapped[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def _laid_by_place(self, ids: npt.NDArray[Any]) -> tuple[Ints, Ints, Ints | None]:
        """Return the rows, all their places at once: where pieces are short that is quicker than one by one."""
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
        places = np.repeat(at - ahead, lengths) + np.arange(lengths.sum())
        tokens.reshape(-1)[places], labels.reshape(-1)[places] = self._gathered(starts, lengths)
        if self.cross_documents:
            return tokens, labels, None
        documents = np.zeros(shape, dtype=np.int64)  # 0 is what fills the row
        documents.reshape(-1)[places] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        return tokens, labels, documents

    def _gathered(self, starts: Ints, lengths: Ints) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the tokens of pieces one after the other, and those after each of them: each is read once."""
        more = lengths + 1
        ahead = np.cumsum(more) - more
        found = self._tokens[np.repeat(starts - ahead, more) + np.arange(more.sum())]
        is_token, is_label = np.ones(len(found), dtype=bool), np.ones(len(found), dtype=bool)
        is_token[ahead + lengths], is_label[ahead] = False, False
        return found[is_token], found[is_label]
