"""PackedSource: rows of whole documents as samples."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.rows.kept_rows import FORMAT, rows_of_split
from paceline.task.data.rows.of_split import SourceOfSplit, rows_at, watch_of
from paceline.task.data.rows.packing import WINDOW_PIECES, Ints, PackedRows
from paceline.task.data.rows.rows_from import RowsFrom
from paceline.task.data.sources.shards.tokens_in_files import TokenParts
from paceline.task.data.sources.tokens import Split

IGNORED = -100  # the label of what is no token
LONG_TOKENS = 32  # of pieces that are as long on average, and mapped, each is copied by itself

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DocumentRuns:
    """Runs of tokens of other documents than the first of their row, in the flattened rows, in order."""

    begins: list[int]
    lengths: list[int]
    numbers: list[int]  # of the document in its row, from 2 on

    def number(self, documents: Array, first: int) -> None:
        """Write the numbers of the documents into those of rows, all of them 1, of which `first` is the first row."""
        flat, begin = documents.reshape(-1), first * documents.shape[1]
        for at in range(bisect_left(self.begins, begin), bisect_left(self.begins, begin + len(flat))):
            start = self.begins[at] - begin
            flat[start : start + self.lengths[at]] = self.numbers[at]


@lru_cache(maxsize=2)
def _first_documents(rows: int, tokens: int) -> Array:
    """Return the documents of rows of one document each, to be copied: numpy copies sooner than it writes ones."""
    found = np.ones((rows, tokens), dtype=np.int32)
    found.flags.writeable = False
    return found


@dataclass(frozen=True, slots=True)
class RowsAsTheyLie:
    """Packed rows as they lie in the files: tokens and labels of the files' type, [rows, seq_len]."""

    tokens: Array
    labels: Array
    # Labels that are another token than their row's next one, and their places in the flattened labels, in order.
    patched: list[int]
    places: list[int]
    short: list[int]  # rows that are not full, in order
    filled: list[int]  # and the tokens in each of them
    # Of each token, from 1 on in each row; None where documents mix. Where most rows are of one document, that is not
    # written before a batch is: its runs say which tokens are of another.
    documents: Array | DocumentRuns | None
    counts: Array | None  # which labels count, where not all of them do

    def documents_of(self, first: int, last: int) -> Array | None:
        """Return the documents of the rows first..last, int32; of what fills a row any. None where they mix."""
        if not isinstance(self.documents, DocumentRuns):
            return None if self.documents is None else self.documents[first:last].copy()
        found = _first_documents(last - first, self.tokens.shape[1]).copy()
        self.documents.number(found, first)
        return found


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
        self._tokens = tokens.view(np.ndarray) if isinstance(tokens, np.ndarray) else tokens
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
        self.fingerprint = packed_fingerprint(split.digest, seq_len, FORMAT)

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
        laid = self._laid_whole if self._is_long else self._laid_by_place
        if (scattered := self._scattered) is None:
            return laid(ids)
        if scattered.is_cold:
            bounds = zip(self.rows.firsts[ids].tolist(), self.rows.firsts[np.asarray(ids) + 1].tolist(), strict=True)
            pieces = np.concatenate([np.arange(first, last) for first, last in bounds] or [np.zeros(0, np.int64)])
            starts, size = self.rows.starts[pieces], self._tokens.itemsize
            scattered.expect(starts * size, (starts + self.rows.lengths[pieces] + 1) * size)
        with scattered.copying(len(ids)):
            return laid(ids)

    def batch(self, gathered: RowsAsTheyLie, first: int, last: int) -> Any:
        """Return {"tokens", "labels"}, and "documents" where they do not mix."""
        import torch

        tokens, labels = gathered.tokens[first:last].astype(np.int64), gathered.labels[first:last].astype(np.int64)
        if gathered.counts is not None:
            labels[~gathered.counts[first:last]] = IGNORED
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if (documents := gathered.documents_of(first, last)) is not None:
            batch["documents"] = torch.from_numpy(documents)
        flat, begin, end = labels.reshape(-1), first * self.items_per_sample, last * self.items_per_sample
        for at in range(bisect_left(gathered.places, begin), bisect_left(gathered.places, end)):
            flat[gathered.places[at] - begin] = gathered.patched[at]
        for at in range(bisect_left(gathered.short, first), bisect_left(gathered.short, last)):
            labels[gathered.short[at] - first, gathered.filled[at] :] = IGNORED
            if documents is not None:
                documents[gathered.short[at] - first, gathered.filled[at] :] = 0
        return batch

    def joined(self, parts: Sequence[RowsAsTheyLie], places: Sequence[Ints]) -> RowsAsTheyLie:
        """Return the rows of several sources as one, each part's at its places."""
        size = self.items_per_sample
        at = [_moved(part.places, place, size) for part, place in zip(parts, places, strict=True)]
        rows = [place[part.short] for part, place in zip(parts, places, strict=True)]
        patches, patched = _in_order(at, [part.patched for part in parts])
        short, filled = _in_order(rows, [part.filled for part in parts])
        counts: list[Array] | None = None
        if any(part.counts is not None for part in parts):
            everywhere = [np.ones(part.tokens.shape, dtype=bool) for part in parts]
            counts = [
                every if part.counts is None else part.counts for part, every in zip(parts, everywhere, strict=True)
            ]
        return RowsAsTheyLie(
            rows_at([part.tokens for part in parts], places),
            rows_at([part.labels for part in parts], places),
            patched,
            patches,
            short,
            filled,
            None if self.cross_documents else _joined_documents(parts, places, size),
            rows_at(counts, places) if counts else None,
        )

    def _laid_whole(self, ids: npt.NDArray[Any]) -> RowsAsTheyLie:
        """Return the rows, each copied from its first piece on, and those of several pieces laid anew.

        Where pieces are long most rows are a single one, and one call copies nearly all. A row is read with the token
        after its end: its labels are what lies one further on, but for the last of a piece that has another after it.
        """
        seq_len = self.items_per_sample
        begins = self.rows.firsts[ids]
        starts, lengths = self.rows.starts[begins], self.rows.lengths[begins]
        # To leave out here what is laid anew takes longer than copying it in vain.
        rows, is_whole = self._in_rows.rows_from(starts, starts + lengths + 1, seq_len + 1)
        documents = None if self.cross_documents else DocumentRuns([], [], [])
        found = RowsAsTheyLie(rows[:, :-1], rows[:, 1:], [], [], [], [], documents, None)
        rest = np.flatnonzero((lengths < seq_len) | ~is_whole)
        if len(rest):
            self._lay_pieces(rows, rest, is_whole[rest], begins[rest], self.rows.firsts[ids[rest] + 1], found)
        return found

    def _lay_pieces(
        self, rows: Array, places: Ints, has_first: npt.NDArray[np.bool_], firsts: Ints, lasts: Ints,
        found: RowsAsTheyLie,
    ) -> None:  # fmt: skip
        """Lay the pieces firsts..lasts of each row at `places` of `rows`, and note what of the labels is not there.

        Each piece is laid with the token after it, its last label; the next one lies over that. Rows that `has_first`
        names begin with the first one already.
        """
        size, seq_len = rows.shape[1], self.items_per_sample
        assert rows.flags.c_contiguous, "rows are laid as one run of tokens"
        flat, counts = rows.reshape(-1), lasts - firsts
        ends = np.cumsum(counts)
        pieces = np.repeat(lasts - ends, counts) + np.arange(ends[-1])
        starts, lengths = self.rows.starts[pieces], self.rows.lengths[pieces]
        ahead, stops = np.cumsum(lengths), starts + lengths
        ahead -= lengths
        at = np.repeat(places * size - ahead[ends - counts], counts) + ahead  # where each begins
        after = at + lengths
        is_there = np.zeros(len(at), dtype=bool)
        is_there[ends - counts] = has_first
        labels, laid = flat[after], np.flatnonzero(~is_there)  # of those that are there, before others lie over them
        labels[laid] = self._in_rows.lay(flat, at[laid], starts[laid], stops[laid] + 1)
        filled = after[ends - 1] - places * size
        is_short = filled < seq_len
        for row, tokens in zip(places[is_short].tolist(), filled[is_short].tolist(), strict=True):
            rows[row, tokens:] = 0
            found.short.append(row)
            found.filled.append(tokens)
        other = np.flatnonzero(flat[after] != labels)
        found.patched.extend(labels[other].tolist())
        # Of the flattened labels: a row of them is one shorter than one of tokens with the token after its end.
        found.places.extend((after[other] - 1 - np.repeat(places, counts)[other]).tolist())
        if isinstance(runs := found.documents, DocumentRuns):
            is_other = np.ones(len(at), dtype=bool)
            is_other[ends - counts] = False
            others = np.flatnonzero(is_other)
            runs.begins.extend((at[others] - np.repeat(places, counts - 1)).tolist())  # flattened tokens, as above
            runs.lengths.extend(lengths[others].tolist())
            runs.numbers.extend((others - np.repeat(ends - counts, counts - 1) + 1).tolist())

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
        counted, filled = self._counted_labels(starts, lengths), np.bincount(row, lengths, len(ids))
        return RowsAsTheyLie(
            laid(tokens),
            laid(labels),
            [],
            [],
            np.flatnonzero(filled < seq_len).tolist(),
            filled[filled < seq_len].astype(np.int64).tolist(),
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


def packed_fingerprint(digest: str, seq_len: int, version: int) -> str:
    """Return the fingerprint of the rows that a version of the packing makes of the tokens of a digest."""
    named = f"{digest} packed {seq_len} {WINDOW_PIECES} {version}"
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def _joined_documents(parts: Sequence[RowsAsTheyLie], places: Sequence[Ints], size: int) -> Array | DocumentRuns:
    """Return the documents of several sources' rows as one's, each part's at its places."""
    runs = [part.documents for part in parts if isinstance(part.documents, DocumentRuns)]
    if len(runs) < len(parts):
        numbered = [part.documents if isinstance(part.documents, np.ndarray) else part.documents_of(0, len(part.tokens))
                    for part in parts]  # fmt: skip
        return rows_at([each for each in numbered if each is not None], places)
    at = [_moved(each.begins, place, size) for each, place in zip(runs, places, strict=True)]
    begins, lengths = _in_order(at, [each.lengths for each in runs])
    return DocumentRuns(begins, lengths, _in_order(at, [each.numbers for each in runs])[1])


def _moved(flattened: list[int], place: Ints, size: int) -> Ints:
    """Return places in flattened rows of a size where the rows are at other places."""
    row, within = np.divmod(np.array(flattened, dtype=np.int64), size)
    found: Ints = place[row] * size + within
    return found


def _in_order(places: Sequence[Ints], values: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Return the places of all parts in order, and their values."""
    joined = np.concatenate([np.asarray(each, dtype=np.int64) for each in places])
    order = np.argsort(joined)
    return joined[order].tolist(), np.concatenate([np.asarray(each, dtype=np.int64) for each in values])[order].tolist()
