"""Rows of the coming steps, gathered with those of this one: of a few short rows, a read's own calls take as long again
as the copy.

They are gathered as they lie, two or four bytes a token, and made into a batch by the step that trains on them: the
int64 of several steps would be more than a core's cache holds, and take longer to write than what is spared.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.order.many_steps import StepIds
from paceline.task.data.protocol import GathersRows

MOST_ITEMS = 2**18  # tokens that are gathered at once: twice as many take packed rows a tenth less


class HeldRows(NamedTuple):
    """A step's rows among those that were gathered with them: from row `first` on."""

    source: GathersRows
    gathered: object
    first: int

    def batch(self, taken: slice) -> Any:
        """Return a slice of the step's rows as a batch."""
        return self.source.batch(self.gathered, self.first + taken.start, self.first + taken.stop)


class RowsTogether:
    """Gathers the rows of a step, and with them those of steps that follow, as long as all are few."""

    def __init__(self, source: Any, ids: StepIds) -> None:
        """`ids` are what says which rows those are."""
        self._ids, self._source = ids, cast(GathersRows, source)
        # By the attribute: a source in an order of its own passes it on.
        self._most_rows = MOST_ITEMS // source.items_per_sample if getattr(source, "gathers_rows", False) else 0
        self._gathered: object = None
        self._of: npt.NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)  # their ids, [steps, rows]
        self._first, self._samples = 0, 1  # the first position of those, and samples from a step to the next

    def at(self, positions: npt.NDArray[np.int64], samples: int) -> tuple[npt.NDArray[np.int64], HeldRows | None]:
        """Return the ids at consecutive positions, and their rows; None of rows that are to be read by themselves.

        The next step's positions are `samples` further on. Raises DataError past the end of an order that has one.
        """
        first, rows, of = positions.item(0), len(positions), self._of
        step, within = divmod(first - self._first, self._samples)
        if not within and 0 <= step < len(of) and rows == of.shape[1]:
            return of[step], HeldRows(self._source, self._gathered, step * rows)
        ids = self._ids.at(positions, samples)
        if 2 * rows > self._most_rows or not self._gather(self._ids.known(self._most_rows // rows)):
            return ids, None
        self._first, self._samples = first, samples
        return ids, HeldRows(self._source, self._gathered, 0)

    def _gather(self, ids: npt.NDArray[np.int64]) -> bool:
        """Gather the rows of steps, [steps, rows] ids of them, and return whether that was done: not of one alone, and
        not where any of them cannot be read. What is wrong with a row is said by the step that it is read for."""
        self._gathered, self._of = None, ids[:0]
        if len(ids) < 2:
            return False
        try:
            self._gathered = self._source.gather(ids.reshape(-1))
        except DataError:
            return False
        self._of = ids
        return True
