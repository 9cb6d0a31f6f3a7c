"""PackedSource: documents of a tokenised corpus laid side by side in rows, best fit first, each whole where it fits."""

from __future__ import annotations

import bisect
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.order.permutation import keyed, permuted
from paceline.task.data.sources.tokens import TokenSplit

WINDOW_PIECES = 8192  # pieces that are fitted together: memory and time stay bounded, and 0.04 % stays empty
SEED = 0  # which pieces may share a row does not depend on the task's seed
IGNORED = -100  # the label of what is no token

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedRows:
    """Which pieces of a text make which row. Row r holds the pieces from firsts[r] on, up to firsts[r + 1].

    A piece is `lengths[i]` tokens from `starts[i]` on, each with the token after it as its label.
    """

    firsts: Ints  # [rows + 1]
    starts: Ints  # [pieces]
    lengths: Ints  # [pieces]


def pieces_of(offsets: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Return (starts, lengths) of the pieces of documents: whole documents, or runs of seq_len of longer ones.

    A document is read from the end-of-document token before it, so that its first token is a label too; its last label
    is its own end. No piece holds tokens of two documents, and every token but the first is a label once.
    """
    begins = np.maximum(offsets[:-1].astype(np.int64) - 1, 0)
    sizes = offsets[1:].astype(np.int64) - 1 - begins
    counts = -(-sizes // seq_len)
    document = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + within * seq_len
    return starts, np.minimum(seq_len, sizes[document] - within * seq_len)


def pack(starts: Ints, lengths: Ints, seq_len: int) -> PackedRows:
    """Return the rows of at most seq_len tokens that hold every piece once: best-fit decreasing, window by window.

    Pieces are shuffled first, so that a row does not hold neighbours. The same pieces give the same rows anywhere.
    """
    if not len(lengths):
        return PackedRows(np.zeros(1, dtype=np.int64), starts, lengths)
    shuffled = permuted(
        keyed(SEED, np.zeros(1, dtype=np.uint64)), np.arange(len(lengths), dtype=np.uint64), len(lengths)
    ).astype(np.int64)
    order, sizes = list[Ints](), list[Ints]()
    for at in range(0, len(shuffled), WINDOW_PIECES):
        window = shuffled[at : at + WINDOW_PIECES]
        rows = best_fit(lengths[window], seq_len)
        order += [window[row] for row in rows]
        sizes.append(np.array([len(row) for row in rows], dtype=np.int64))
    chosen = np.concatenate(order)
    firsts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(sizes))])
    return PackedRows(firsts, starts[chosen], lengths[chosen])


def best_fit(lengths: Ints, capacity: int) -> list[Ints]:
    """Return rows of indices whose lengths add up to at most `capacity`: best-fit decreasing.

    The longest piece goes first, each into the row in which it leaves least room.
    """
    rows = list[list[int]]()
    by_room = defaultdict[int, list[int]](list)  # rows by the room they have left
    rooms = list[int]()  # the rooms there are, sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(at)
        rows[row].append(index)
        if left := room - length:
            if not by_room[left]:
                bisect.insort(rooms, left)
            by_room[left].append(row)
    return [np.array(row, dtype=np.int64) for row in rows]


class PackedSource:
    """Sample i is row i: documents, and pieces of those longer than a row, of at most seq_len tokens together.

    What a row does not fill are tokens of 0 whose labels do not count. Without `cross_documents` a batch says which
    document each token is of, and what fills the row is one of its own.
    """

    unit = "tokens"
    reads_in_threads = True  # of a mapped file, and of nothing that changes

    def __init__(self, split: TokenSplit, vocab: int, seq_len: int, cross_documents: bool = True) -> None:
        """Map the split and pack its documents. Raises DataError where it does not hold two tokens."""
        self.split, self.items_per_sample = split, seq_len
        self.vocab: int | None = vocab
        self.cross_documents = cross_documents
        self._tokens = split.open()
        self.rows = pack(*pieces_of(split.offsets(), seq_len), seq_len)
        self.samples = len(self.rows.firsts) - 1
        if split.tokens < 2 or not self.samples:
            raise DataError(
                f"the {split.name} data do not make a single sample",
                f"they are {split.tokens:,} tokens in {split.documents:,} documents",
                "more text, or validation_fraction = 0",
            )
        named = f"{split.digest} packed {seq_len} {WINDOW_PIECES}"
        self.fingerprint = hashlib.blake2b(named.encode(), digest_size=16).hexdigest()

    @property
    def waste(self) -> float:
        """The part of all rows that no token fills."""
        return 1 - float(self.rows.lengths.sum()) / (self.samples * self.items_per_sample)

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
        within = np.arange(lengths.sum()) - np.repeat(ahead, lengths)
        places, source = np.repeat(at, lengths) + within, np.repeat(starts, lengths) + within
        shape = (len(ids), self.items_per_sample)
        tokens, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        tokens.reshape(-1)[places] = self._tokens[source]
        labels.reshape(-1)[places] = self._tokens[source + 1]
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if not self.cross_documents:
            documents = np.zeros(shape, dtype=np.int64)  # 0 is what fills the row
            documents.reshape(-1)[places] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
            batch["documents"] = torch.from_numpy(documents)
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that receives the source maps the files again; the tokens themselves do not travel.
        return PackedSource, (self.split, self.vocab, self.items_per_sample, self.cross_documents)
