"""StepSeries: the steps of a run that count, in rising order, growing as they are made."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.history.records import number

COLUMNS = ("step", "time", "loss", "grad_norm", "lr", "total", "data", "rate", "peak_bytes", "weight")
WIDTH = len(COLUMNS)
TOTAL, DATA = COLUMNS.index("total"), COLUMNS.index("data")
NOTHING = (0, 0.0, 0.0)


@dataclass(frozen=True)
class StepValues:
    """Steps as columns of one table, as they were when it was taken; NaN where a record lacks a value."""

    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one of COLUMNS."""
        return self.values[:, COLUMNS.index(name)]


class StepSeries:
    """Rows of COLUMNS, 80 bytes a step. A step that is made again takes the place of all from it on."""

    def __init__(self) -> None:
        self._values = array("d")

    def __len__(self) -> int:
        return len(self._values) // WIDTH

    def add(self, line: Mapping[str, object]) -> tuple[int, float, float]:
        """Add a step's line; return how many steps it undid, their seconds, and of these the waiting for data."""
        row = row_of(line)
        undone = self.undo_from(row[0])
        self._values.extend(row)
        return undone

    def undo_from(self, step: float) -> tuple[int, float, float]:
        """Take the steps from this one on away; return how many they were, their seconds, and the waiting for data."""
        values, size = self._values, len(self._values)
        if not size or values[size - WIDTH] < step:
            return NOTHING
        count, total, data = 0, 0.0, 0.0
        while size and values[size - WIDTH] >= step:
            size -= WIDTH
            count += 1
            total += _known(values[size + TOTAL])
            data += _known(values[size + DATA])
        del values[size:]
        return count, total, data

    def last(self, name: str) -> float:
        """Return the newest step's value; NaN where there is no step."""
        return self._values[COLUMNS.index(name) - WIDTH] if len(self._values) else math.nan

    def taken(self) -> StepValues:
        """Return a copy of all rows."""
        return StepValues(np.array(self._values, dtype=np.float64).reshape(-1, WIDTH))


def row_of(line: Mapping[str, object]) -> list[float]:
    """Return a step's line as a row of COLUMNS."""
    seconds = line.get("seconds")
    parts: Mapping[str, object] = seconds if isinstance(seconds, Mapping) else {}
    found = (
        line.get("step"), line.get("time"), line.get("loss"), line.get("grad_norm"), line.get("lr"),
        parts.get("total"), parts.get("data"), line.get("tokens_per_second"), line.get("peak_bytes"),
        line.get("weight"),
    )  # fmt: skip
    return [math.nan if (value := number(each)) is None else value for each in found]


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
