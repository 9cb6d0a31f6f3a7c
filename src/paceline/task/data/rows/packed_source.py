"""PackedSource: rows of whole documents as samples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.rows.kept_rows import FORMAT, rows_of_split
from paceline.task.data.rows.of_split import SourceOfSplit, watch_of
from paceline.task.data.rows.packing import WINDOW_PIECES, Ints, PackedRows
from paceline.task.data.rows.rows_from import RowsFrom
from paceline.task.data.sources.shards.tokens_in_files import TokenParts
from paceline.task.data.sources.tokens import Split

IGNORED = -100  # the label of what is no token
LONG_TOKENS = 128  # of pieces that are as long on average, and mapped, each is copied by itself

Array = npt.NDArray[Any]
RowPieces = tuple[int, list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class RowsAsTheyLie:
    """Packed rows as they lie in the files: tokens and labels of the files' type, [rows, seq_len]."""

    tokens: Array
    labels: Array
    # Of rows that are not one run of tokens: how many they hold, and the places and values of labels that are not the
    # next token of the row.
    parts: list[RowPieces | None]
    documents: Array | None  # from 1 on in each row, 0 of what fills it; None where documents mix
    counts: Array | None  # which labels count, where not all of them do


class PackedSource(SourceOfSplit):
    """Sample i is row i: documents, and pieces of those longer than a row, of at most seq_len tokens together.

    What a row does not fill are tokens of 0 whose labels do not count. Without `cross_documents` a batch says which
    document of its row each token is of, and what fills the row is one of its own.
    """

    leaves_out = False  # whether labels of tokens are left out

    def __init__(self, split: Split, vocab: int, seq_len: int, cross_documents: bool = True) -> None:
        """Map the split and pack its documents. Raises DataError where it does not hold two tokens."""
        super().__init__(split, vocab, seq_len, cross_documents)
        self._watch, tokens = watch_of(split), split.open()
        # A memory map makes an object of its own of each slice; an array over it does not.
        self._tokens: Any = tokens.view(np.ndarray) if isinstance(tokens, np.ndarray) else tokens
        self._filling = np.zeros(seq_len, dtype=tokens.dtype)
        rows = self._rows_of(split, seq_len)
        self.rows = PackedRows(np.asarray(rows.firsts), np.asarray(rows.starts), np.asarray(rows.lengths))
        near = tokens.is_near if isinstance(tokens, TokenParts) else True
        # Which labels count is worked out place by place.
        self._is_long = near and not self.leaves_out and split.tokens >= LONG_TOKENS * len(self.rows.lengths)
        self._in_rows = tokens if isinstance(tokens, TokenParts) else RowsFrom(self._tokens)
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

    def gather(self, ids: npt.NDArray[Any]) -> RowsAsTheyLie:
        """Return the rows as they lie."""
        assert min(ids.tolist(), default=0) >= 0, "a sample id is negative"
        self._watch()
        return self._laid_whole(ids) if self._is_long else self._laid_by_place(ids)

    def batch(self, gathered: RowsAsTheyLie, first: int, last: int) -> Any:
        """Return {"tokens", "labels"}, and "documents" where they do not mix."""
        import torch

        tokens, labels = gathered.tokens[first:last].astype(np.int64), gathered.labels[first:last].astype(np.int64)
        if gathered.counts is not None:
            labels[~gathered.counts[first:last]] = IGNORED
        for row, part in enumerate(gathered.parts[first:last]):
            if part is not None:
                for place, label in part[1]:
                    labels[row, place] = label
                if part[0] < self.items_per_sample:
                    labels[row, part[0] :] = IGNORED
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if gathered.documents is not None:
            batch["documents"] = torch.from_numpy(gathered.documents[first:last].astype(np.int64))
        return batch

    def _laid_whole(self, ids: npt.NDArray[Any]) -> RowsAsTheyLie:
        """Return the rows, each copied from its first piece on, and then what else it holds laid over.

        Where pieces are long most rows are a single one, and one call copies nearly all. A row is read with the token
        after its end: its labels are what lies one further on, but for the last of a piece that has another after it.
        """
        seq_len = self.items_per_sample
        begins = self.rows.firsts[ids]
        starts, lengths = self.rows.starts[begins], self.rows.lengths[begins]
        rows, is_whole = self._in_rows.rows_from(starts, starts + lengths + 1, seq_len + 1)
        documents = None if self.cross_documents else np.ones((len(ids), seq_len), dtype=np.int32)
        parts: list[RowPieces | None] = [None] * len(ids)
        rest = np.flatnonzero((lengths < seq_len) | ~is_whole)
        if len(rest):
            rows[rest] = self._laid_piece_by_piece(rest.tolist(), ids[rest], parts, documents)
        return RowsAsTheyLie(rows[:, :-1], rows[:, 1:], parts, documents, None)

    def _laid_piece_by_piece(
        self, places: list[int], ids: npt.NDArray[Any], parts: list[RowPieces | None], documents: Array | None
    ) -> Array:
        """Return rows of seq_len + 1 tokens, and note at their places among all rows what they are made of.

        Of a batch's few pieces numpy's calls would take longer than the loop.
        """
        seq_len, lasts = self.items_per_sample, self.rows.firsts[ids + 1]
        counts = lasts - self.rows.firsts[ids]
        ends = np.cumsum(counts)
        pieces = np.repeat(lasts - ends, counts) + np.arange(ends[-1])
        begins, lengths = self.rows.starts[pieces], self.rows.lengths[pieces]
        stops = begins + lengths
        after = self._in_rows.at(stops)
        stops[ends - 1] += 1  # the last label of a row lies after it
        runs = self._in_rows.runs(begins.tolist(), stops.tolist())
        sizes, labels = lengths.tolist(), after.tolist()
        first, short = 0, list[tuple[int, int, int]]()  # row, tokens in it, runs up to its end
        for row, (place, last) in enumerate(zip(places, ends.tolist(), strict=True)):
            at, inner = 0, list[tuple[int, int]]()
            for number in range(first, last):
                stop = at + sizes[number]
                if documents is not None:
                    documents[place, at:stop] = number - first + 1
                at = stop
                inner.append((at - 1, labels[number]))
            parts[place] = at, inner
            if at < seq_len:
                short.append((row, at, last))
                if documents is not None:
                    documents[place, at:] = 0
            first = last
        for _, at, last in reversed(short):  # from the last one, so that places before it stay
            runs.insert(last, self._filling[: seq_len - at])
        rows = np.concatenate(runs).reshape(-1, seq_len + 1)
        for row, at, _ in short:
            rows[row, at] = 0  # the last label's place
        return rows

    def _laid_by_place(self, ids: npt.NDArray[Any]) -> RowsAsTheyLie:
        """Return the rows, all their places at once: where pieces are short that is quicker than one by one."""
        seq_len = self.items_per_sample
        first, last = self.rows.firsts[ids], self.rows.firsts[np.asarray(ids) + 1]
        counts = last - first
        ahead_of_row = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(ahead_of_row, counts)  # number of each piece in its row
        pieces = np.repeat(first, counts) + within
        starts, lengths = self.rows.starts[pieces], self.rows.lengths[pieces]
        row = np.repeat(np.arange(len(ids)), counts)
        # Where each piece stands in the flattened rows: after the pieces of its row before it.
        ahead = np.cumsum(lengths) - lengths
        began = ahead[ahead_of_row] if len(counts) else ahead
        at = row * seq_len + ahead - began[row]
        places = np.repeat(at - ahead, lengths) + np.arange(lengths.sum())

        def laid(values: Array) -> Array:
            found = np.zeros((len(ids), seq_len), dtype=values.dtype)
            found.reshape(-1)[places] = values
            return found

        tokens, labels = self._gathered(starts, lengths)
        counted = self._counted_labels(starts, lengths)
        return RowsAsTheyLie(
            laid(tokens),
            laid(labels),
            [(int(filled), []) for filled in np.bincount(row, lengths, len(ids)).tolist()],
            None if self.cross_documents else laid(np.repeat(within + 1, lengths).astype(np.int32)),
            None if counted is None else laid(counted),
        )

    def _counted_labels(self, starts: Ints, lengths: Ints) -> Array | None:
        """Return which labels of pieces, one after the other, count. None where all of them do: here."""
        return None

    def _gathered(self, starts: Ints, lengths: Ints) -> tuple[Array, Array]:
        """Return the tokens of pieces one after the other, and those after each of them: each is read once."""
        more = lengths + 1
        ahead = np.cumsum(more) - more
        found = self._tokens[np.repeat(starts - ahead, more) + np.arange(more.sum())]
        is_token, is_label = np.ones(len(found), dtype=bool), np.ones(len(found), dtype=bool)
        is_token[ahead + lengths], is_label[ahead] = False, False
        return found[is_token], found[is_label]
