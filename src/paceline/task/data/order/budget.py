"""Batches of as many samples as make up a number of tokens: their number follows from the lengths, and varies.

The batch that starts at a position holds the samples from there on whose lengths add up to the budget at most, and one
in any case. It depends on nothing else: a run that is killed and resumed, on any ranks, cuts the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.spec.profile import Fill
from paceline.task.data.order.of_source import ids_at, order_of

LEAST_AHEAD = 16  # samples that are looked at at once
STRETCHES, BATCHES = 8, 12  # of a training that are looked at to price it, and batches of each


class TokenBudget:
    """Says how many samples each batch has, and how many of them pass at once."""

    def __init__(self, source: object, seed: int, tokens: int, longest: int) -> None:
        """`longest` is the length that a plan's micro-batch was priced with, a sample's length that was filled up.

        Raises ConfigError where the lengths of the samples are not known.
        """
        lengths, self._multiple = lengths_of(source), multiple_of(source)
        if lengths is None:
            raise ConfigError(
                "task.batch_rows = 'by_length' with samples whose lengths are not known",
                "how many of them make up the batch's tokens follows from their lengths",
                'lengths = [...] on the data set, a number per sample, or task.batch_rows = "fixed"',
            )
        self._source, self._seed, self._tokens, self.longest = source, seed, tokens, longest
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

        Each counts as the longest of the batch, to which all may be filled up, and a little further.
        """
        longest = filled(int(self._lengths_at(position, samples).max(initial=0)), self._multiple, self.longest)
        return max(1, micro_batch * self.longest // max(1, longest))

    def batches(self, samples: int) -> list[npt.NDArray[np.int64]]:
        """Return the lengths of the samples of some batches of a training on so many samples, in their order.

        They are of stretches that lie evenly in it: what a mixture gives may change.
        """
        found = []
        for stretch in range(STRETCHES):
            position = samples * stretch // STRETCHES
            for _ in range(BATCHES):
                count = self.at(0, position)
                if len(lengths := self._lengths_at(position, count)) < count:  # the order has ended
                    break
                found.append(lengths)
                position += count
        return found

    def fills(self, samples: int, rows: int) -> tuple[Fill, ...]:
        """Return how full the batches of a training on so many samples are, against `rows` of the longest.

        One for each power of two below `rows`, and for `rows`, as micro-batches.
        """
        batches, sizes = self.batches(samples), [*(2**power for power in range((rows - 1).bit_length())), rows]
        return tuple(self._fill(batches, rows, size) for size in sizes) if batches else ()

    def _fill(self, batches: Sequence[npt.NDArray[np.int64]], rows: int, micro_batch: int) -> Fill:
        tokens = pairs = passes = 0.0
        for lengths in batches:
            at_once = max(1, micro_batch * self.longest // self._filled_to(lengths.max(initial=1)))
            parts = np.array_split(lengths, -(-len(lengths) // at_once))  # as even as a rank splits its rows
            widths = [self._filled_to(part.max(initial=1)) for part in parts]
            tokens += sum(len(part) * width for part, width in zip(parts, widths, strict=True))
            pairs += sum(len(part) * width**2 for part, width in zip(parts, widths, strict=True))
            passes += len(parts)
        whole = len(batches) * rows
        return Fill(
            micro_batch,
            tokens / (whole * self.longest),
            pairs / (whole * self.longest**2),
            passes * micro_batch / whole,
        )

    def _filled_to(self, longest: Any) -> int:
        return filled(int(longest), self._multiple, self.longest)

    def _lengths_at(self, position: int, count: int) -> npt.NDArray[Any]:
        last = position + count if self._end is None else min(position + count, self._end)
        positions = np.arange(position, last, dtype=np.int64)
        found: npt.NDArray[Any] = self._lengths[ids_at(self._source, self._seed, positions)]
        return found


def budget_of(source: object, seed: int, tokens: int) -> TokenBudget:
    """Return the budget of a source's batches. Raises ConfigError where the lengths of its samples are not known."""
    return TokenBudget(source, seed, tokens, longest_of(source))


def longest_of(source: object) -> int:
    """Return how long the longest of a source's samples is, filled up as it is read; 1 where no lengths are known."""
    lengths, inner = lengths_of(source), getattr(source, "sources", (source,))
    longest = 1 if lengths is None else int(np.asarray(lengths).max(initial=1))
    return filled(longest, multiple_of(source), max(getattr(each, "seq_len", math.inf) for each in inner))


def filled(tokens: int, multiple: int, most: float) -> int:
    """Return how long a row is that is filled up to a multiple, and to no more than the most."""
    return int(min(tokens + -tokens % multiple, max(most, tokens)))


def multiple_of(source: object) -> int:
    """Return the multiple of tokens that a source's rows are filled up to: 1 where it fills up none."""
    inner = [each for each in getattr(source, "sources", ()) if hasattr(each, "multiple")]
    return max([int(getattr(each, "multiple", 1)) for each in inner] or [int(getattr(source, "multiple", 1))])


def lengths_of(source: object) -> object:
    """Return the lengths of a source's samples, by id; None where they are not known."""
    while source is not None:
        if (lengths := getattr(source, "lengths", None)) is not None:
            return lengths
        source = getattr(source, "inner", None)
    return None
