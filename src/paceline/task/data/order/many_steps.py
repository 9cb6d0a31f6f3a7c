"""The ids of a rank's rows for many steps at once: of few rows, numpy's calls take longer than what they compute."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.task.data.order.of_source import ids_at, order_of

AT_ONCE = 8192  # ids, about: of 1,024 the calls still take twice as long as what they compute

Ints = npt.NDArray[np.int64]


class StepIds:
    """Looks up the ids of rows that come in steps of equal size, the next of which are worked out with the first.

    The longer steps follow each other, the more are worked out at once; who jumps to and fro gets what it asks for.
    """

    def __init__(self, source: object, seed: int) -> None:
        self._source, self._seed = source, seed
        self._end: int | None = getattr(order_of(source), "end", None)  # of a mixture whose sources have limits
        self._known: Ints = np.zeros((0, 0), dtype=np.int64)  # [steps, rows]
        self._first, self._samples = 0, 1  # the first position of those, and samples from a step to the next
        self._step = 0  # the one that was asked for last
        self._steps, self._following = 1, (-1, 0)  # worked out at once; position and rows that come after those

    def at(self, positions: Ints, samples: int) -> Ints:
        """Return the ids at consecutive positions; the next step's are `samples` further on.

        Raises DataError past the end of an order that has one.
        """
        first, rows = positions.item(0), len(positions)
        step, within = divmod(first - self._first, self._samples)
        # Of batches of another size the steps that are known lie elsewhere, though this one may be among them.
        if within or not 0 <= step < len(self._known) or (samples, rows) != (self._samples, self._known.shape[1]):
            most = max(1, AT_ONCE // rows)
            self._steps = min(2 * self._steps, most) if (first, rows) == self._following else 1
            coming = self.coming(positions, samples, self._steps)
            self._known = ids_at(self._source, self._seed, coming.reshape(-1)).reshape(coming.shape)
            self._first, self._samples, step = first, samples, 0
            self._following = int(coming[-1, 0]) + samples, rows
        self._step = step
        found: Ints = self._known[step]
        return found

    def known(self, most: int) -> Ints:
        """Return the ids of the step that was asked for last and of those after it that are worked out: [steps, rows].

        They are `most` steps at most.
        """
        return self._known[self._step : self._step + most]

    def coming(self, positions: Ints, samples: int, steps: int) -> Ints:
        """Return the positions of so many steps, this one first: [steps, rows]. Fewer where the order ends before."""
        if self._end is not None:
            steps = max(1, min(steps, (self._end - 1 - int(positions[-1])) // samples + 1))
        return positions + samples * np.arange(steps, dtype=np.int64)[:, None]
