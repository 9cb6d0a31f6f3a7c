"""The ids of a rank's rows for many steps at once: of few rows, numpy's calls take longer than what they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.task.data.order.of_source import ids_at, order_of

AT_ONCE = 1024  # ids, about

Ints = npt.NDArray[np.int64]


class StepIds:
    """Looks up the ids of rows that come in steps of equal size, the next of which are worked out with the first.

    The longer steps follow each other, the more are worked out at once; who jumps to and fro gets what it asks for.
    """

    def __init__(self, source: Any, seed: int) -> None:
        self._source, self._seed = source, seed
        self._end: int | None = getattr(order_of(source), "end", None)  # of a mixture whose sources have limits
        self._known: dict[tuple[int, int], Ints] = {}  # by the first position and the number of rows
        self._steps, self._following = 1, (-1, 0)  # worked out at once; the key that comes after those

    def at(self, positions: Ints, samples: int) -> Ints:
        """Return the ids at consecutive positions; the next step's are `samples` further on.

        Raises DataError past the end of an order that has one.
        """
        key = int(positions[0]), len(positions)
        if key not in self._known:
            most = max(1, AT_ONCE // len(positions))
            self._steps = min(2 * self._steps, most) if key == self._following else 1
            coming = self.coming(positions, samples, self._steps)
            found = ids_at(self._source, self._seed, coming.reshape(-1)).reshape(coming.shape)
            self._known = {(int(first), key[1]): ids for first, ids in zip(coming[:, 0], found, strict=True)}
            self._following = int(coming[-1, 0]) + samples, key[1]
        return self._known[key]

    def coming(self, positions: Ints, samples: int, steps: int) -> Ints:
        """Return the positions of so many steps, this one first: [steps, rows]. Fewer where the order ends before."""
        if self._end is not None:
            steps = max(1, min(steps, (self._end - 1 - int(positions[-1])) // samples + 1))
        return positions + samples * np.arange(steps, dtype=np.int64)[:, None]
