"""Rows of a batch in an order whose runs have about equal lengths together: the loads of ranks that read runs of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MOST_ROWS = 1024  # of longer batches the lengths even out by themselves, and the work would grow

Ints = npt.NDArray[np.int64]


def balanced(lengths: npt.NDArray[np.integer]) -> Ints:
    """Return an order of each batch, [batches, rows], in which its halves, their halves and so on are equally long.

    Longest first: neighbours in the sorted order go one to each half, the pair that differs most first, the longer one
    to the half that has less so far. Runs of a number of ranks that is no power of two are nearly as even.
    """
    rows = lengths.shape[1]
    if rows < 2:
        return np.broadcast_to(np.arange(rows), lengths.shape)
    first, second = _halves(lengths)
    if first.shape[1] == second.shape[1]:
        both = np.concatenate([first, second])
        own = np.concatenate([np.take_along_axis(lengths, half, 1) for half in (first, second)])
        both = np.take_along_axis(both, balanced(own), 1)
        return np.concatenate([both[: len(lengths)], both[len(lengths) :]], axis=1)
    parts = [np.take_along_axis(half, balanced(np.take_along_axis(lengths, half, 1)), 1) for half in (first, second)]
    return np.concatenate(parts, axis=1)


def _halves(lengths: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
    """Return which rows of each batch are its first half, and which its second: of an odd number the larger one."""
    order = np.argsort(lengths, axis=1, kind="stable")
    odd = order.shape[1] % 2  # then the shortest row goes to the second half, which has one more
    rest, shorter, longer = order[:, :odd], order[:, odd::2], order[:, odd + 1 :: 2]
    differences = np.take_along_axis(lengths, longer, 1) - np.take_along_axis(lengths, shorter, 1)
    widest = np.argsort(-differences, axis=1, kind="stable")
    by_pair = np.take_along_axis(differences, widest, 1).T.astype(np.int64)
    ahead = -np.take_along_axis(lengths, rest, 1).sum(1).astype(np.int64)  # how much more the first half has
    turned = np.empty(by_pair.shape, dtype=bool)
    for pair, difference in enumerate(by_pair):
        turned[pair] = ahead > 0
        ahead += np.where(turned[pair], -difference, difference)
    shorter, longer = np.take_along_axis(shorter, widest, 1), np.take_along_axis(longer, widest, 1)
    second = np.where(turned.T, longer, shorter)
    return np.where(turned.T, shorter, longer), np.concatenate([rest, second], axis=1)
