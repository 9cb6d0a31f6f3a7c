"""What a report needs of a journal's records: the starts, the rare records by kind, and all steps as one table.

A journal may be a fragment: a run that was killed at once has a single record, an older one lacks fields. Nothing
here raises on a missing or ill-typed field (spec/journal/record.py); a missing number is NaN in the table.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.history.rates import UNKNOWN_ITEMS, ForecastItems, forecast_items, rated
from paceline.spec.journal.kinds import CheckpointRecord, EvaluationRecord, RunStarted, StepRecord, parse
from paceline.spec.journal.record import Record, Some, read
from paceline.spec.journal.steady import Step, unsteady
from paceline.spec.journal.timing.clock import RunMoments, at_moment, shifted, shifts_of

SECONDS = ("total", "data", "forward_backward", "reduce", "optimizer", "other")
OWN_COLUMNS = ("attempt", "step", "time", "position_before", "position_after", "loss", "weight", "grad_norm", "lr",
               "tokens_per_second", "peak_bytes", "waiting_seconds")  # fmt: skip
COLUMNS = (*OWN_COLUMNS, *SECONDS)


def number(value: Any) -> float | None:
    """Return the value as a finite float; None where it is missing, not a number, NaN or infinite."""
    if type(value) is float:  # as nearly all of a long journal are
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def table(value: object) -> dict[str, Any]:
    """Return the value where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def text(value: object) -> str:
    """Return the value as text; an absent one is the empty string."""
    return "" if value is None else str(value)


def json_safe(value: object) -> Any:
    """Return the value with tuples as lists and numbers that JSON lacks (NaN, infinities) as None."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class StepTable:
    """Steps as rows in the order they were written, COLUMNS as columns; 1e6 steps take 128 MB."""

    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one column; NaN where a record lacks the field."""
        return self.values[:, COLUMNS.index(name)]

    def numbers(self) -> list[tuple[float, float]]:
        """Return every row's (start, step)."""
        return list(zip(self.column("attempt").tolist(), self.column("step").tolist(), strict=True))

    def where(self, mask: NDArray[np.bool_]) -> StepTable:
        """Return the rows that the mask picks."""
        return StepTable(self.values[mask])


@dataclass(frozen=True)
class Records:
    """A journal, sorted into what a report reads."""

    starts: tuple[RunStarted, ...]  # by attempt
    steps: StepTable
    others: tuple[Record, ...]  # of every kind but those two
    spans: dict[int, tuple[float, float]]  # attempt -> time of its first and last record
    schema: int  # the highest schema version seen

    def of(self, kind: type[Some]) -> list[Some]:
        """Return the records of a kind in the order they were written."""
        return [record for record in self.others if isinstance(record, kind)]

    @cached_property
    def unsteady(self) -> dict[Step, str]:
        """The steps, as (start, step), whose time holds more than the step, such as a save; with the reason of each."""
        marks = [record for record in self.others if isinstance(record, EvaluationRecord | CheckpointRecord)]
        busy = [(mark.KIND, (mark.attempt or 1, mark.step)) for mark in marks]
        return unsteady(self.steps.numbers(), busy)

    def start(self, attempt: int) -> RunStarted:
        """Return the start of an attempt; one of which nothing is known where there is none."""
        return next((start for start in self.starts if start.attempt == attempt), NO_START)


NO_START = read(RunStarted, {})


def row_of(record: StepRecord, attempt: int, step: float) -> list[float]:
    """Return a step as a row of COLUMNS."""
    values = {**vars(record), "attempt": attempt, "step": step}
    found = [*map(values.__getitem__, OWN_COLUMNS), *map(record.seconds.get, SECONDS)]
    return [math.nan if (known := number(value)) is None else known for value in found]


def gather(lines: Iterable[Mapping[str, object]]) -> Records:
    """Return the lines of a journal sorted for a report, in one pass over them; unknown kinds are not shown."""
    starts: dict[int, RunStarted] = {}
    items: dict[int, ForecastItems] = {}
    others: list[Record] = []
    spans: dict[int, tuple[float, float]] = {}
    rows = array("d")
    schema, clock = 0, RunMoments()
    for line in lines:
        attempt = int(number(line.get("attempt")) or 1)
        schema = max(schema, int(number(line.get("schema")) or 0))
        moment = clock.of(attempt, line)
        if moment is not None:
            first, last = spans.get(attempt, (moment, moment))
            spans[attempt] = (min(first, moment), max(last, moment))
        if moment is not None and line.get("time") != moment:
            line = at_moment(line, moment)
        if line.get("kind") == StepRecord.KIND:
            line = rated(line, items.get(attempt, UNKNOWN_ITEMS))
        record = parse({**line, "time": moment, "attempt": attempt})
        if isinstance(record, RunStarted):
            starts[attempt], items[attempt] = record, forecast_items(record)
        elif isinstance(record, StepRecord):
            if record.step is not None:
                rows.extend(row_of(record, attempt, record.step))
        elif record is not None:
            others.append(record)
    values = np.frombuffer(rows, dtype=np.float64).reshape(-1, len(COLUMNS)) if rows else np.empty((0, len(COLUMNS)))
    by_attempt = tuple(starts[attempt] for attempt in sorted(starts))
    found = Records(by_attempt, StepTable(values), tuple(others), spans, schema)
    shifts = shifts_of(by_attempt, spans, clock.moved)
    return _shifted(found, shifts) if any(shifts.values()) else found


def _shifted(found: Records, shifts: Mapping[int, float]) -> Records:
    """Return the records with the moments of each start shifted by so many seconds."""
    values, attempts = found.steps.values.copy(), found.steps.column("attempt")
    for attempt, seconds in shifts.items():
        values[attempts == attempt, COLUMNS.index("time")] += seconds
    starts = [shifted(each, shifts.get(each.attempt or 1, 0.0)) for each in found.starts]
    others = [shifted(each, shifts.get(each.attempt or 1, 0.0)) for each in found.others]
    spans = {attempt: (first + shifts.get(attempt, 0.0), last + shifts.get(attempt, 0.0))
             for attempt, (first, last) in found.spans.items()}  # fmt: skip
    return Records(tuple(starts), StepTable(values), tuple(others), spans, found.schema)
