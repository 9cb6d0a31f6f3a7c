"""PackedSource: rows of whole documents as samples."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.spec.data.labels import IGNORED
from paceline.task.data.rows.kept_rows import FORMAT, rows_of_split
from paceline.task.data.rows.of_split import SourceOfSplit, rows_at, tokens_and_labels, watch_of
from paceline.task.data.rows.packing import WINDOW_PIECES, Ints, PackedRows
from paceline.task.data.rows.rows_from import RowsFrom
from paceline.task.data.sources.shards.tokens_in_files import TokenParts
from paceline.task.data.sources.tokens import Split

LOW_NUMBERS = 8  # of documents in a row; hardly a row of long pieces has more
LONG_TOKENS = 32  # of pieces that are as long on average, and mapped, each is copied by itself

Array = npt.NDArray[Any]


class Seams(NamedTuple):
    """Where runs begin in packed rows, in the order of the flattened rows. The label of the token before a run is not
    the token that lies there."""

    begins: list[int]
    lengths: list[int]
    numbers: list[int]  # of the run's document in its row; 0 of what fills the row
    labels: list[int]  # of the token before

    def among(self, first: int, last: int) -> range:
        """Return the places in these lists of those among the flattened tokens first..last."""
        return range(bisect_left(self.begins, first), bisect_left(self.begins, last))


NO_SEAMS = Seams([], [], [], [])


def _run(tokens: int, number: int) -> memoryview:
    return np.full(tokens, number, dtype=np.int32).data


@lru_cache(maxsize=2)
def _runs_of_documents(tokens: int) -> list[memoryview]:
    """Return so many tokens' documents of each low number."""
    return [_run(tokens, number) for number in range(LOW_NUMBERS)]


@lru_cache(maxsize=2)
def _first_documents(rows: int, tokens: int) -> Array:
    """Return the documents of rows of one document each, to be copied: numpy copies sooner than it writes ones."""
    found = np.ones((rows, tokens), dtype=np.int32)
    found.flags.writeable = False
    return found


@dataclass(frozen=True, slots=True)
class RowsAsTheyLie:
    """Packed rows as they lie in the files: tokens and labels of the files' type, [2, rows, seq_len].

    `documents` are those of each token, from 1 on in each row and 0 of what fills it. Where most rows are of one
    document they are not written before a batch is: the seams tell them.
    """

    both: Array
    seams: Seams  # of other documents than the first of their row
    fillings: Seams  # of what fills a row, at its end
    is_apart: bool  # whether documents are told
    documents: Array | None = None
    counts: Array | None = None  # which labels count, where not all of them do

    def batch(self, first: int, last: int) -> tuple[Array, Array, Array | None]:
        """Return tokens and labels, int64, and documents, int32, of the rows first..last; None where they mix."""
        both = self.both[:, first:last].astype(np.int64, order="C")
        tokens, labels = both[0], both[1]
        size, flat = labels.shape[1], labels.reshape(-1)
        begin, end = first * size, last * size
        begins, before = self.seams.begins, self.seams.labels
        for at in self.seams.among(begin, end):
            flat[begins[at] - begin - 1] = before[at]
        begins, lengths, _, before = self.fillings
        for at in self.fillings.among(begin, end):
            start = begins[at] - begin
            flat[start - 1] = before[at]
            flat[start : start + lengths[at]] = IGNORED
        if self.counts is not None:
            labels[~self.counts[first:last]] = IGNORED
        return tokens, labels, self._documents(first, last) if self.is_apart else None

    def _documents(self, first: int, last: int) -> Array:
        """Return the documents of the rows first..last, int32.

        Runs of one number are copied from memory: that takes a third of an assignment.
        """
        if self.documents is not None:
            return self.documents[first:last].copy()
        tokens = self.both.shape[2]
        found, begin, end = _first_documents(last - first, tokens).copy(), first * tokens, last * tokens
        there, same = found.reshape(-1).data, _runs_of_documents(tokens)
        for part in (self.seams, self.fillings):
            for at in part.among(begin, end):
                start, length, number = part.begins[at] - begin, part.lengths[at], part.numbers[at]
                run = same[number] if number < LOW_NUMBERS else _run(length, number)
                there[start : start + length] = run[:length]
        return found

    def told_documents(self) -> Array:
        """Return the documents of all rows."""
        _, _, found = self.batch(0, self.both.shape[1])
        assert found is not None, "documents are told"
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

    def gather(self, ids: npt.NDArray[np.int64]) -> RowsAsTheyLie:
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

        tokens, labels, documents = gathered.batch(first, last)
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if documents is not None:
            batch["documents"] = torch.from_numpy(documents)
        return batch

    def joined(self, parts: Sequence[RowsAsTheyLie], places: Sequence[Ints]) -> RowsAsTheyLie:
        """Return the rows of several sources as one, each part's at its places."""
        counts: list[Array] | None = None
        if any(part.counts is not None for part in parts):
            everywhere = [np.ones(part.both.shape[1:], dtype=bool) for part in parts]
            counts = [
                every if part.counts is None else part.counts for part, every in zip(parts, everywhere, strict=True)
            ]
        are_told = any(part.documents is not None for part in parts)
        return RowsAsTheyLie(
            rows_at([part.both for part in parts], places),
            _joined_seams([part.seams for part in parts], places, self.items_per_sample),
            _joined_seams([part.fillings for part in parts], places, self.items_per_sample),
            parts[0].is_apart,
            rows_at([part.told_documents() for part in parts], places) if are_told else None,
            rows_at(counts, places) if counts else None,
        )

    def _laid_whole(self, ids: npt.NDArray[np.int64]) -> RowsAsTheyLie:
        """Return the rows, each copied from its first piece on, and those of several pieces laid anew.

        Where pieces are long most rows are a single one, and one call copies nearly all. A row is read with the token
        after its end: its labels are what lies one further on, but for the last of a piece that has another after it.
        """
        seq_len = self.items_per_sample
        begins = self.rows.firsts[ids]
        starts, lengths = self.rows.starts[begins], self.rows.lengths[begins]
        # To leave out here what is laid anew takes longer than copying it in vain.
        rows, is_whole = self._in_rows.rows_from(starts, starts + lengths + 1, seq_len + 1)
        seams = fillings = NO_SEAMS
        rest = np.flatnonzero((lengths < seq_len) | ~is_whole)
        if len(rest):
            lasts = self.rows.firsts[ids[rest] + 1]
            seams, fillings = self._lay_pieces(rows, rest, is_whole[rest], begins[rest], lasts)
        return RowsAsTheyLie(tokens_and_labels(rows), seams, fillings, not self.cross_documents)

    def _lay_pieces(
        self, rows: Array, places: Ints, has_first: npt.NDArray[np.bool_], firsts: Ints, lasts: Ints
    ) -> tuple[Seams, Seams]:
        """Lay the pieces firsts..lasts of each row at `places` of `rows`; return where they meet, and what fills rows.

        Each piece is laid with the token after it, its last label; the next one lies over that. Rows that `has_first`
        names begin with the first one already.
        """
        assert rows.flags.c_contiguous, "rows are laid as one run of tokens"
        size, seq_len, counts = rows.shape[1], self.items_per_sample, lasts - firsts
        ends = np.cumsum(counts)
        begins = ends - counts
        pieces = np.repeat(lasts - ends, counts) + np.arange(ends[-1])
        starts, lengths = self.rows.starts[pieces], self.rows.lengths[pieces]
        stops = np.cumsum(lengths)
        at = stops - lengths
        at += np.repeat(places * size - at[begins], counts)  # where each begins
        stops = starts + lengths
        if not has_first.all():
            self._lay(rows, at[begins[~has_first]], starts[begins[~has_first]], stops[begins[~has_first]] + 1)
        is_seam = np.ones(len(at), dtype=bool)
        is_seam[begins] = False
        seam = np.flatnonzero(is_seam)
        begins_in_rows = at - np.repeat(places, counts)  # a row of labels is one shorter than what is laid here
        number = seam - np.repeat(begins, counts - 1) + 1
        labels = self._lay(rows, at[seam], starts[seam], stops[seam] + 1)
        seams = Seams(begins_in_rows[seam].tolist(), lengths[seam].tolist(), number.tolist(), labels)
        after = at[ends - 1] + lengths[ends - 1]
        short = np.flatnonzero(after - places * size < seq_len)
        after, row = after[short], places[short]
        missing = (row + 1) * size - 1 - after
        fillings = Seams((after - row).tolist(), missing.tolist(), [0] * len(short), rows.reshape(-1)[after].tolist())
        for where, tokens in zip(row.tolist(), missing.tolist(), strict=True):
            rows[where, seq_len - tokens :] = 0
        return seams, fillings

    def _lay(self, rows: Array, places: Ints, starts: Ints, stops: Ints) -> list[int]:
        """Copy the tokens starts..stops of each run to its place of the flattened rows; return what lay there before.

        A run may lie over the end of the one before. Views of memory copy them: of a few short runs, slices of arrays
        take twice as long.
        """
        there, here, found = rows.reshape(-1).data, self._in_rows.memory, list[int]()
        runs = zip(places.tolist(), self._in_rows.spots(starts, stops), (stops - starts).tolist(), strict=True)
        for number, (place, spot, length) in enumerate(runs):
            found.append(there[place])
            if spot < 0:
                run = self._tokens[int(starts[number]) : int(stops[number])]
                there[place : place + length] = run.astype(rows.dtype).data
            else:
                there[place : place + length] = here[spot : spot + length]
        return found

    def _laid_by_place(self, ids: npt.NDArray[np.int64]) -> RowsAsTheyLie:
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

        def laid(*values: Array) -> Array:
            found = np.zeros((len(values), len(ids), seq_len), dtype=values[0].dtype)
            for own, value in zip(found, values, strict=True):
                own.reshape(-1)[places] = value
            return found

        both, counted = laid(*self._gathered(starts, lengths)), self._counted_labels(starts, lengths)
        filled = np.bincount(row, lengths, len(ids)).astype(np.int64)
        short = np.flatnonzero(filled < seq_len)
        begins = short * seq_len + filled[short]
        return RowsAsTheyLie(
            both,
            NO_SEAMS,
            Seams(
                begins.tolist(),
                (seq_len - filled[short]).tolist(),
                [0] * len(short),
                both[1].reshape(-1)[begins - 1].tolist(),
            ),
            not self.cross_documents,
            None if self.cross_documents else laid(np.repeat(within + 1, lengths).astype(np.int32))[0],
            None if counted is None else laid(counted)[0],
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


def _joined_seams(parts: Sequence[Seams], places: Sequence[Ints], size: int) -> Seams:
    """Return the seams of several sources' rows as one's, each part's rows of a size at its places."""
    moved = []
    for part, place in zip(parts, places, strict=True):
        row, within = np.divmod(np.array(part.begins, dtype=np.int64), size)
        moved.append(np.stack([place[row] * size + within, part.lengths, part.numbers, part.labels]))
    joined = np.concatenate(moved, axis=1).astype(np.int64)
    return Seams(*joined[:, np.argsort(joined[0])].tolist())
