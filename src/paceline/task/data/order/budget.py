"""Batches of as many samples as make up a number of tokens: their number follows from the lengths, and varies.

The batch that starts at a position holds the samples from there on whose lengths add up to the budget at most, and one
in any case. It depends on nothing else: a run that is killed and resumed, on any ranks, cuts the same batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.task.data.order.of_source import ids_at, order_of

LEAST_AHEAD = 16  # samples that are looked at at once


class TokenBudget:
    """Says how many samples each batch has, and how many of them pass at once."""

    def __init__(self, source: object, seed: int, tokens: int, longest: int) -> None:
        """`longest` is the length that a plan's micro-batch was priced with.

        Raises ConfigError where the lengths of the samples are not known.
        """
        lengths = lengths_of(source)
        if lengths is None:
            raise ConfigError(
                "task.batch_rows = 'by_length' with samples whose lengths are not known",
                "how many of them make up the batch's tokens follows from their lengths",
                'lengths = [...] on the data set, a number per sample, or task.batch_rows = "fixed"',
            )
        self._source, self._seed, self._tokens, self._longest = source, seed, tokens, longest
        self._end: int | None = getattr(order_of(source), "end", None)  # of a mixture whose sources have limits
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if not self._lengths.any():
            raise ConfigError(
                "task.batch_rows = 'by_length' with samples that have no length",
                "all lengths are 0, so that no number of them makes up the batch's tokens",
                'the lengths of the samples, or task.batch_rows = "fixed"',
            )
        self._ahead = max(LEAST_AHEAD, 2 * tokens // max(1, round(float(self._lengths.mean()))))

    def at(self, step: int, position: int) -> int:
        """Return the samples of the batch that starts at a position, whatever step it is of."""
        ahead = self._ahead
        while True:
            lengths = self._lengths_at(position, ahead)
            within = int(np.searchsorted(np.cumsum(lengths), self._tokens, side="right"))
            if within < ahead:  # or what is left of an order that has an end
                return max(1, within)
            ahead *= 2

    def at_once(self, position: int, samples: int, micro_batch: int) -> int:
        """Return how many samples a rank passes at once: as many as take no more tokens than the plan's micro-batch.

        Each counts as the longest of the batch, to which all may be filled up.
        """
        longest = int(self._lengths_at(position, samples).max(initial=0))
        return max(1, micro_batch * self._longest // max(1, longest))

    def _lengths_at(self, position: int, count: int) -> npt.NDArray[Any]:
        last = position + count if self._end is None else min(position + count, self._end)
        positions = np.arange(position, last, dtype=np.int64)
        found: npt.NDArray[Any] = self._lengths[ids_at(self._source, self._seed, positions)]
        return found


def lengths_of(source: object) -> object:
    """Return the lengths of a source's samples, by id; None where they are not known."""
    while source is not None:
        if (lengths := getattr(source, "lengths", None)) is not None:
            return lengths
        source = getattr(source, "inner", None)
    return None
