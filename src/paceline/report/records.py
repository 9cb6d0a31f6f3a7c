"""What a report needs of a journal's records: the starts, the rare records by kind, and all steps as one table.

A journal may be a fragment: a run that was killed at once has a single record, an older one lacks fields. Nothing
here raises on a missing or ill-typed field; a missing number is NaN in the table and None elsewhere.
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

from paceline.run.record.steady import BUSY, Step, unsteady

SECONDS = ("total", "data", "forward_backward", "reduce", "optimizer", "other")
COLUMNS = ("attempt", "step", "time", "position_after", "loss", "weight", "grad_norm", "lr", "tokens_per_second",
           "peak_bytes", "waiting_seconds", *SECONDS)  # fmt: skip


def number(value: Any) -> float | None:
    """Return the value as a finite float; None where it is missing, not a number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def table(value: Any) -> dict[str, Any]:
    """Return the value where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str:
    """Return the value as text; an absent one is the empty string."""
    return "" if value is None else str(value)


def json_safe(value: Any) -> Any:
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

    starts: tuple[dict[str, Any], ...]  # run_started, by attempt
    steps: StepTable
    by_kind: dict[str, list[dict[str, Any]]]  # every kind but run_started and step
    spans: dict[int, tuple[float, float]]  # attempt -> time of its first and last record
    schema: int  # the highest schema version seen

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind in the order they were written."""
        return self.by_kind.get(kind, [])

    @cached_property
    def unsteady(self) -> dict[Step, str]:
        """The steps, as (start, step), whose time is not a step's alone, and why."""
        busy = [(kind, (r["attempt"], number(r.get("step")))) for kind in BUSY for r in self.of(kind)]
        return unsteady(self.steps.numbers(), busy)

    def start(self, attempt: int) -> dict[str, Any]:
        """Return the run_started record of an attempt; empty where there is none."""
        return next((start for start in self.starts if start["attempt"] == attempt), {})


def _row(record: Mapping[str, Any], attempt: int, step: float) -> list[float]:
    seconds = table(record.get("seconds"))
    fields = {**record, **{name: seconds.get(name) for name in SECONDS}, "attempt": attempt, "step": step}
    values = [number(fields.get(name)) for name in COLUMNS]
    return [math.nan if value is None else value for value in values]


def gather(records: Iterable[Mapping[str, Any]]) -> Records:
    """Return the records sorted for a report, in one pass over them; unknown kinds are kept but not shown."""
    starts: dict[int, dict[str, Any]] = {}
    by_kind: dict[str, list[dict[str, Any]]] = {}
    spans: dict[int, tuple[float, float]] = {}
    rows = array("d")
    schema = 0
    for source in records:
        attempt = int(number(source.get("attempt")) or 1)
        schema = max(schema, int(number(source.get("schema")) or 0))
        moment = number(source.get("time"))
        if moment is not None:
            first, last = spans.get(attempt, (moment, moment))
            spans[attempt] = (min(first, moment), max(last, moment))
        kind, step = text(source.get("kind")), number(source.get("step"))
        if kind == "run_started":
            starts[attempt] = {**source, "attempt": attempt}
        elif kind != "step":
            by_kind.setdefault(kind, []).append({**source, "attempt": attempt})
        elif step is not None:
            rows.extend(_row(source, attempt, step))
    values = np.frombuffer(rows, dtype=np.float64).reshape(-1, len(COLUMNS)) if rows else np.empty((0, len(COLUMNS)))
    return Records(tuple(starts[attempt] for attempt in sorted(starts)), StepTable(values), by_kind, spans, schema)
