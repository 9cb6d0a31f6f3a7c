"""Batches of as many samples as make up a number of tokens: their number follows from the lengths, and varies.

The batch that starts at a position holds the samples from there on whose lengths add up to the budget at most, and one
in any case. It depends on nothing else: a run that is killed and resumed, on any ranks, cuts the same batches.
"""

from __future__ import annotations

import numpy as np

from paceline.errors import ConfigError
from paceline.spec.task import Task
from paceline.task.data.order.lengths import FixedRows, RowLengths, filled, fills_up, lengths_of, longest_of

LEAST_AHEAD = 16  # samples that are looked at at once


class TokenBudget(RowLengths):
    """Says how many samples each batch has, and how many of them pass at once."""

    def __init__(self, source: object, seed: int, tokens: int, longest: int) -> None:
        """`longest` is the length that a plan's micro-batch was priced with, a sample's length that was filled up.

        Raises ConfigError where the lengths of the samples are not known.
        """
        if (lengths := lengths_of(source)) is None:
            raise ConfigError(
                "task.batch_rows = 'by_length' with samples whose lengths are not known",
                "how many of them make up the batch's tokens follows from their lengths",
                'lengths = [...] on the data set, a number per sample, or task.batch_rows = "fixed"',
            )
        super().__init__(source, seed, lengths, longest)
        self._tokens = tokens
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
            lengths = self.lengths_at(position, ahead)
            within = int(np.searchsorted(np.cumsum(lengths), self._tokens, side="right"))
            if within < ahead:  # or what is left of an order that has an end
                return max(1, within)
            ahead *= 2

    def at_once(self, position: int, samples: int, micro_batch: int) -> int:
        """Return how many samples a rank passes at once: as many as take no more tokens than the plan's micro-batch.

        Each counts as the longest of the batch, to which all may be filled up, and a little further.
        """
        return self.passed_at_once(int(self.lengths_at(position, samples).max(initial=0)), micro_batch)

    def passed_at_once(self, longest: int, micro_batch: int) -> int:
        """Return how many samples a rank passes at once of a batch whose longest one has `longest` tokens."""
        return max(1, micro_batch * self.longest // max(1, int(filled(longest, self._multiple, self.longest))))


def budget_of(source: object, seed: int, tokens: int) -> TokenBudget:
    """Return the budget of a source's batches. Raises ConfigError where the lengths of its samples are not known."""
    return TokenBudget(source, seed, tokens, longest_of(source))


def rows_of_task(task: Task, source: object, samples: int) -> RowLengths | None:
    """Return the batches of a task whose rows differ in length, of `samples` where their number is fixed.

    None where all rows are as long as each other.
    """
    if task.batch_rows != "fixed":
        return budget_of(source, task.seed, int(task.global_batch.value))
    return FixedRows(source, task.seed, samples) if fills_up(source) else None
