"""Samples of known lengths along the training, and how full batches of them are: counted as a run cuts and fills them.

Each data rank has a contiguous part of a batch's rows, which it passes in as many parts as the rank with the most rows
needs. The rows of a part are filled up to its longest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.spec.layout import largest_part
from paceline.spec.profile import Fill
from paceline.task.data.order.of_source import ids_at, order_of

STRETCHES, BATCHES = 8, 12  # of a training that are looked at to price it, and batches of each

Ints = npt.NDArray[np.int64]


class RowLengths(ABC):
    """The lengths of a source's samples, in batches whose rows are filled up to the longest beside them."""

    as_planned = False  # whether every batch is passed in as many parts as planned

    def __init__(self, source: object, seed: int, lengths: object, longest: int) -> None:
        """`longest` is the length that a plan's micro-batch is priced with, a sample's length that was filled up."""
        self._source, self._seed, self.longest = source, seed, longest
        self._lengths, self._multiple = np.asarray(lengths, dtype=np.int64), multiple_of(source)
        self._end: int | None = getattr(order_of(source), "end", None)  # of a mixture whose sources have limits

    @abstractmethod
    def at(self, step: int, position: int) -> int:
        """Return the samples of the batch that starts at a position, which is that of update `step`."""

    @abstractmethod
    def passed_at_once(self, longest: int, micro_batch: int) -> int:
        """Return how many samples of a batch with a longest one a rank passes at once, under a plan's micro-batch."""

    def batches(self, samples: int) -> list[Ints]:
        """Return the lengths of the samples of some batches of a training on so many samples, in their order.

        They are of stretches that lie evenly in it: what a mixture gives may change.
        """
        found = []
        for stretch in range(STRETCHES):
            position = samples * stretch // STRETCHES
            for _ in range(BATCHES):
                count = self.at(1, position)
                if len(lengths := self.lengths_at(position, count)) < count:  # the order has ended
                    break
                found.append(lengths)
                position += count
        return found

    def fills(self, samples: int, rows: int) -> tuple[Fill, ...]:
        """Return how full the batches of a training on so many samples are, against `rows` of the longest.

        One for each number of data ranks (1, 2, 3, 4, 6, 8, 12, ... up to `rows`) and each micro-batch that a rank can
        have: each power of two below its part of the rows, and that part.
        """
        if not (batches := self.batches(samples)):
            return ()
        counts = np.array([len(lengths) for lengths in batches])
        longest = [int(lengths.max(initial=1)) for lengths in batches]
        flat, found = np.concatenate(batches), []
        for ranks in sorted(count for power in range(rows.bit_length()) for count in (2**power, 3 * 2**power)):
            part = largest_part(rows, ranks)
            sizes = [*(2**power for power in range((part - 1).bit_length())), part] if ranks <= rows else []
            largest = -(-counts // ranks)  # part of each batch on a rank
            for size in sizes:
                at_once = np.array([self.passed_at_once(each, size) for each in longest])
                passes = -(-largest // at_once)
                tokens, pairs = self._of_fullest(flat, counts, ranks, passes)
                planned = len(batches) * part  # samples of a device, over all batches
                made = None if self.as_planned else float(passes.sum() / planned * size)
                filled_up = tokens / (planned * self.longest), pairs / (planned * self.longest**2)
                found.append(Fill(size, *filled_up, made, ranks))
        return tuple(found)

    def _of_fullest(self, lengths: Ints, counts: Ints, ranks: int, passes: Ints) -> tuple[float, float]:
        """Return the positions, and the pairs of them in one row, of the rank that has most of them in each batch.

        `lengths` are those of batches of so many samples, one after the other, of which a rank makes so many passes.
        All batches at once: there are about a hundred, of few rows each, and a search asks for dozens of such counts.
        """
        cells = ranks * passes  # what every rank has in every pass
        batch = np.repeat(np.arange(len(counts)), cells)
        rank, part = np.divmod(np.arange(len(batch)) - np.repeat(np.cumsum(cells) - cells, cells), passes[batch])
        first = counts[batch] * rank // ranks
        rows = counts[batch] * (rank + 1) // ranks - first
        begins = np.repeat(np.cumsum(counts) - counts, cells) + first + rows * part // passes[batch]
        sizes = np.diff(begins, append=len(lengths))
        widths, some = np.zeros(len(begins), dtype=np.int64), sizes > 0
        widths[some] = filled(np.maximum.reduceat(lengths, begins[some]), self._multiple, self.longest)
        of_rank = np.flatnonzero(part == 0)
        tokens, pairs = (np.add.reduceat(sizes * each, of_rank).reshape(-1, ranks) for each in (widths, widths**2))
        return float(tokens.max(1).sum()), float(pairs.max(1).sum())

    def typical_pass(self, micro_batch: int) -> tuple[int, int]:
        """Return where the samples begin that a single rank passes at once, and how many they are.

        They are the first ones of a batch, one of the training's first, and of as many tokens as half of those have.
        """
        found, position = list[tuple[int, int, int]](), 0
        for _ in range(BATCHES):
            count = self.at(1, position)
            lengths = self.lengths_at(position, count)
            at_once = min(len(lengths), self.passed_at_once(int(lengths.max(initial=1)), micro_batch))
            found.append((at_once * int(lengths[:at_once].max(initial=0)), position, at_once))
            if len(lengths) < count:  # the order has ended
                break
            position += count
        return sorted(found)[len(found) // 2][1:]

    def part_of(self, lengths: Ints, micro_batch: int, multiple: int) -> tuple[float, float]:
        """Return the positions, and the pairs of them in one row, of rows that are filled up to a multiple.

        Both are parts of what a micro-batch of the longest samples has.
        """
        width = int(filled(lengths.max(initial=1), multiple, self.longest))
        part = width / self.longest
        return len(lengths) / micro_batch * part, len(lengths) / micro_batch * part**2

    def lengths_at(self, position: int, count: int) -> Ints:
        """Return the lengths of so many samples from a position on, of fewer where the order ends."""
        last = position + count if self._end is None else min(position + count, self._end)
        positions = np.arange(position, last, dtype=np.int64)
        found: Ints = self._lengths[ids_at(self._source, self._seed, positions)]
        return found


class FixedRows(RowLengths):
    """Batches of one number of samples, whatever their lengths."""

    as_planned = True

    def __init__(self, source: object, seed: int, samples: int) -> None:
        """The source says its lengths."""
        super().__init__(source, seed, lengths_of(source), longest_of(source))
        self._samples = samples

    def at(self, step: int, position: int) -> int:
        """Return the samples of any batch."""
        return self._samples

    def passed_at_once(self, longest: int, micro_batch: int) -> int:
        """Return the micro-batch."""
        return micro_batch


def fills_up(source: object) -> bool:
    """Return whether a source's rows are as long as the longest beside them, and their lengths known."""
    return bool(getattr(source, "is_ragged", False)) and lengths_of(source) is not None


def longest_of(source: object) -> int:
    """Return how long the longest of a source's samples is, filled up as it is read; 1 where no lengths are known."""
    lengths, inner = lengths_of(source), getattr(source, "sources", (source,))
    longest = 1 if lengths is None else int(np.asarray(lengths).max(initial=1))
    return int(filled(longest, multiple_of(source), max(getattr(each, "seq_len", math.inf) for each in inner)))


def filled(tokens: Any, multiple: int, most: float) -> Any:
    """Return how long rows are that are filled up to a multiple, and to no more than the most.

    A number of tokens, or an array of them.
    """
    return np.minimum(tokens + -tokens % multiple, np.maximum(most, tokens))


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
