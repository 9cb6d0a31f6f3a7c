"""Packing: pieces of documents laid side by side in rows, best fit first, each document whole where it fits."""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.task.data.order.permutation import keyed, permuted

WINDOW_PIECES = 8192  # pieces that are fitted together: memory and time stay bounded, and 0.04 % stays empty
EVENED_ROWS = 8  # rows that share the room of an emptier one
SEED = 0  # which pieces may share a row does not depend on the task's seed

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
        rows = evened(best_fit(lengths[window], seq_len), lengths[window], seq_len)
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


def evened(rows: list[Ints], lengths: Ints, capacity: int) -> list[Ints]:
    """Return as many rows with the same pieces, in which the room of emptier rows is shared with rows of many pieces.

    Best fit leaves rows that are half empty where small pieces come to an end, and one that may be nearly empty: the
    ranks that do not read them would have the more tokens.
    """
    fills = [int(lengths[row].sum()) for row in rows]
    by_fill = sorted(range(len(rows)), key=lambda row: (fills[row], row))
    empty = [row for row in by_fill if EVENED_ROWS * (capacity - fills[row]) > capacity]
    others = sorted(by_fill[len(empty) :], key=lambda row: (-len(rows[row]), row))
    each = min(EVENED_ROWS - 1, len(others) // max(1, len(empty)))
    for number, row in enumerate(empty if each else []):
        chosen = [row, *others[number * each : (number + 1) * each]]
        dealt = _dealt(np.concatenate([rows[one] for one in chosen]), lengths, len(chosen))
        found = [int(lengths[pieces].sum()) for pieces in dealt]
        if max(found) <= capacity and min(found) > fills[row]:
            for one, pieces in zip(chosen, dealt, strict=True):
                rows[one] = pieces
    return rows


def _dealt(pieces: Ints, lengths: Ints, rows: int) -> list[Ints]:
    """Return the pieces in so many rows, longest first, each where there are fewest tokens."""
    dealt, fills = [list[int]() for _ in range(rows)], [0] * rows
    for piece in pieces[np.argsort(-lengths[pieces], kind="stable")].tolist():
        row = fills.index(min(fills))
        dealt[row].append(piece)
        fills[row] += int(lengths[piece])
    return [np.array(row, dtype=np.int64) for row in dealt]
