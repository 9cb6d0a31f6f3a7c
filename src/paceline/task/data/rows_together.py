"""Rows of the coming steps, gathered with those of this one: of a few short rows, a read's own calls take as long again
as the copy.

They are gathered as they lie, two or four bytes a token, and made into a batch by the step that trains on them: the
int64 of several steps would be more than a core's cache holds, and take longer to write than what is spared.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.order.many_steps import StepIds
from paceline.task.data.protocol import GathersRows

MOST_ITEMS = 2**21  # tokens that are gathered at once: of half as many packed rows take a twentieth more


Ints = npt.NDArray[np.int64]


class StepRows(NamedTuple):
    """The rows of a step: their ids, their positions, and what was gathered of them with those of other steps.

    `gathered` is None of rows that are to be read by themselves; else they are its rows from `first` on.
    """

    ids: Ints
    positions: Ints
    gathered: object = None
    first: int = 0


class RowsTogether:
    """Gathers the rows of a step, and with them those of steps that follow, as long as all are few."""

    def __init__(self, source: Any, ids: StepIds) -> None:
        """`ids` are what says which rows those are."""
        self._ids, self._source = ids, cast(GathersRows, source)
        # By the attribute: a source in an order of its own passes it on.
        self._most_rows = MOST_ITEMS // source.items_per_sample if getattr(source, "gathers_rows", False) else 0
        self._known: list[StepRows] = []  # steps whose rows were gathered together
        # Where the first of them begins, its rows counted from there, and samples from a step to the next.
        self._first, self._offsets, self._samples = 0, np.zeros(0, dtype=np.int64), 1

    def at(self, position: int, offsets: Ints, samples: int) -> StepRows:
        """Return a step's rows, which stand `offsets` after its position: they follow each other.

        The next step begins `samples` further on. Raises DataError past the end of an order that has one.
        """
        if offsets is self._offsets and samples == self._samples:  # made once for all steps alike
            step, within = divmod(position - self._first, samples)
            if not within and 0 <= step < len(self._known):
                return self._known[step]
        positions, rows = offsets + position, len(offsets)
        ids = self._ids.at(positions, samples)
        if 2 * rows > self._most_rows or not self._gather(self._ids.known(self._most_rows // rows), positions, samples):
            return StepRows(ids, positions)
        self._first, self._offsets, self._samples = position, offsets, samples
        return self._known[0]

    def _gather(self, ids: Ints, positions: Ints, samples: int) -> bool:
        """Gather the rows of steps, [steps, rows] ids of them, and return whether that was done: not of one alone, and
        not where any of them cannot be read. What is wrong with a row is said by the step that it is read for."""
        self._known, steps, rows = [], len(ids), ids.shape[1]
        if steps < 2:
            return False
        try:
            gathered = self._source.gather(ids.reshape(-1))
        except DataError:
            return False
        places = positions + samples * np.arange(steps, dtype=np.int64)[:, None]
        self._known = list(map(StepRows, ids, places, repeat(gathered), range(0, steps * rows, rows)))
        return True

    def batch(self, rows: StepRows, start: int, stop: int) -> Any:
        """Return rows start..stop of a step whose rows are gathered as a batch."""
        return self._source.batch(rows.gathered, rows.first + start, rows.first + stop)
