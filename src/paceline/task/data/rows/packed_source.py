"""PackedSource: rows of whole documents as samples."""

from __future__ import annotations

import hashlib
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
    """Where runs begin in packed rows that are not the first of their row: documents, and what fills the row.

    `runs` are in the order of the flattened rows: where each begins, its length, the number of its document in its row
    (0 of what fills the row), and the label of the token before it. Of a row's second document they are told where that
    label is not the token that lies there.
    """

    runs: list[tuple[int, ...]]
    of_rows: Ints  # how many of them lie before each row: [rows + 1]

    @classmethod
    def of(cls, runs: Ints, rows: int, size: int) -> Seams:
        """Return the runs [4, runs], in whatever order, of so many rows of a size."""
        of_rows = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(runs[0] // size, minlength=rows), out=of_rows[1:])
        columns = runs[:, np.argsort(runs[0], kind="stable")].tolist()
        return cls(list(zip(*columns, strict=True)), of_rows)

    def moved(self, places: Ints, size: int) -> Ints:
        """Return the runs [4, runs] as they are where each row lies at its place among others."""
        runs = np.array(self.runs, dtype=np.int64).reshape(-1, 4).T
        runs[0] += size * (places - np.arange(len(places)))[runs[0] // size]
        return runs


def _run(tokens: int, number: int) -> memoryview:
    return np.full(tokens, number, dtype=np.int32).data


@lru_cache(maxsize=2)
def _runs(tokens: int) -> tuple[list[memoryview], memoryview]:
    """Return so many tokens' documents of each low number, and labels that do not count."""
    return [_run(tokens, number) for number in range(LOW_NUMBERS)], np.full(tokens, IGNORED, dtype=np.int64).data


@lru_cache(maxsize=2)
def _first_two(tokens: int) -> Array:
    """Return the documents of rows of two documents: in row n the second begins n tokens before the end."""
    both = np.repeat(np.array([1, 2], dtype=np.int32), tokens)
    return np.lib.stride_tricks.sliding_window_view(both, tokens)


@dataclass(frozen=True, slots=True)
class RowsAsTheyLie:
    """Packed rows as they lie in the files: tokens and labels of the files' type, [2, rows, seq_len].

    `documents` are those of each token, from 1 on in each row and 0 of what fills it. Where most rows are of one
    document or two they are not written before a batch is: `rests` and the seams tell them.
    """

    both: Array
    seams: Seams
    is_apart: bool  # whether documents are told
    rests: Array  # tokens of each row after its first document
    documents: Array | None = None
    counts: Array | None = None  # which labels count, where not all of them do

    def batch(self, first: int, last: int) -> tuple[Array, Array, Array | None]:
        """Return tokens and labels, int64, and documents, int32, of the rows first..last; None where they mix."""
        both = self.both[:, first:last].astype(np.int64, order="C")
        tokens, labels = both
        size = labels.shape[1]
        documents, later = None, None  # the second: documents that are still to be written, from the third of a row on
        if self.is_apart:
            if self.documents is not None:
                documents = self.documents[first:last].copy()
            else:
                documents = _first_two(size)[self.rests[first:last]]
                later = documents.reshape(-1).data
        self._lay_seams(both.reshape(-1).data[labels.size :], later, first, last)
        if self.counts is not None:
            labels[~self.counts[first:last]] = IGNORED
        return tokens, labels, documents

    def _lay_seams(self, labels: memoryview, documents: memoryview | None, first: int, last: int) -> None:
        """Set what is otherwise at the seams of the rows first..last.

        Views of memory are set, and runs of one number copied from memory: an array takes twice or three times as long.
        """
        size, of_rows = self.both.shape[2], self.seams.of_rows
        begin, (same, ignored) = first * size, _runs(size)
        for start, length, number, before in self.seams.runs[of_rows.item(first) : of_rows.item(last)]:
            start -= begin
            labels[start - 1] = before
            if number == 0:
                labels[start : start + length] = ignored[:length]
            if documents is not None and number != 2:
                run = same[number] if number < LOW_NUMBERS else _run(length, number)
                documents[start : start + length] = run[:length]

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
        assert ids.min(initial=0) >= 0, "a sample id is negative"
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
            parts[0].is_apart,
            rows_at([part.rests[:, None] for part in parts], places)[:, 0],
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
        runs = np.zeros((4, 0), dtype=np.int64)
        rest = np.flatnonzero((lengths < seq_len) | ~is_whole)
        if len(rest):
            if not is_whole.all():
                over = np.flatnonzero(~is_whole)
                self._lay(rows, over * rows.shape[1], starts[over], starts[over] + lengths[over] + 1)
            more = self.rows.firsts[ids[rest] + 1] - begins[rest] - 1
            runs = self._lay_pieces(rows, rest, lengths[rest], begins[rest] + 1, more)
        seams = Seams.of(runs, len(ids), seq_len)
        return RowsAsTheyLie(tokens_and_labels(rows), seams, not self.cross_documents, seq_len - lengths)

    def _lay_pieces(self, rows: Array, places: Ints, filled: Ints, firsts: Ints, more: Ints) -> Ints:
        """Lay so many `more` pieces, from `firsts` on, into the rows at `places`, behind the tokens that are `filled`.

        Return the runs of `Seams`, [4, runs]. Each piece is laid with the token after it, its last label; the next one
        lies over that.
        """
        assert rows.flags.c_contiguous, "rows are laid as one run of tokens"
        seq_len = self.items_per_sample
        ends = np.cumsum(more)
        begins = ends - more  # of each row's pieces among all of them
        number = np.arange(ends[-1])
        pieces = np.repeat(firsts - begins, more) + number
        starts, lengths = self.rows.starts[pieces], self.rows.lengths[pieces]
        laid = np.zeros(len(pieces) + 1, dtype=np.int64)
        np.cumsum(lengths, out=laid[1:])
        # A row of labels is one shorter than what is laid here.
        seams = laid[:-1] + np.repeat(places * seq_len + filled - laid[begins], more)
        spots = seams + np.repeat(places, more)
        labels = rows.reshape(-1)[spots]  # of the token before each row's second piece
        after = self._lay(rows, spots, starts, starts + lengths + 1)
        number -= np.repeat(begins - 2, more)
        labels[1:] = np.where(number[1:] > 2, after[:-1], labels[1:])
        others = np.flatnonzero((number > 2) | (labels != rows.reshape(-1)[spots]))  # documents end as others begin
        filled = filled + laid[ends] - laid[begins]
        short = np.flatnonzero(filled < seq_len)
        row, filled = places[short], filled[short]
        runs = np.empty((4, len(others) + len(short)), dtype=np.int64)
        runs[:, : len(others)] = seams[others], lengths[others], number[others], labels[others]
        runs[:, len(others) :] = row * seq_len + filled, seq_len - filled, np.zeros_like(row), rows[row, filled]
        for where, tokens in zip(row.tolist(), filled.tolist(), strict=True):
            rows[where, tokens:] = 0
        return runs

    def _lay(self, rows: Array, places: Ints, starts: Ints, stops: Ints) -> Array:
        """Copy the tokens starts..stops of each run to its place of the flattened rows; return the last of each run.

        A run may lie over the end of the one before. Views of memory copy them: of a few short runs, slices of arrays
        take twice as long.
        """
        there, here, lengths = rows.reshape(-1).data, self._in_rows.memory, stops - starts
        spots, memory = np.array(self._in_rows.spots(starts, stops), dtype=np.int64), np.asarray(here)
        near = spots >= 0
        memory[spots[near]]  # memory that is far away is waited for once, and not for each run
        to, ends = places.tolist(), (places + lengths).tolist()
        if near.all():
            for place, end, spot, stop in zip(to, ends, spots.tolist(), (spots + lengths).tolist(), strict=True):
                there[place:end] = here[spot:stop]
            return memory[spots + lengths - 1]
        last = np.empty(len(spots), dtype=rows.dtype)
        for number, (place, end, spot) in enumerate(zip(to, ends, spots.tolist(), strict=True)):
            if spot < 0:
                there[place:end] = self._tokens[int(starts[number]) : int(stops[number])].astype(rows.dtype).data
            else:
                there[place:end] = here[spot : spot + end - place]
            last[number] = there[end - 1]
        return last

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
        fills = np.zeros((4, len(short)), dtype=np.int64)
        fills[:2], fills[3] = (begins, seq_len - filled[short]), both[1].reshape(-1)[begins - 1]
        return RowsAsTheyLie(
            both,
            Seams.of(fills, len(ids), seq_len),
            not self.cross_documents,
            seq_len - lengths[ahead_of_row],
            None if self.cross_documents else laid(np.repeat(within + 1, lengths).astype(np.int32))[0],
            None if counted is None else laid(counted)[0],
        )

    def _counted_labels(self, starts: Ints, lengths: Ints) -> Array | None:
        """Return which labels of pieces, one after the other, count. None where all of them do: here."""
        return None

    def _gathered(self, starts: Ints, lengths: Ints) -> tuple[Array, Array]:
        """Return the tokens of pieces one after the other, and for each token the next one. A token is read once."""
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
    moved = [part.moved(place, size) for part, place in zip(parts, places, strict=True)]
    return Seams.of(np.concatenate(moved, axis=1), sum(map(len, places)), size)
