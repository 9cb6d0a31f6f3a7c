"""Metrics of held-out samples over the evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.history.records import Records, number, table, text
from paceline.report.series import Series, thin
from paceline.spec.journal.kinds import EvaluationRecord

OWN = ""  # the set of the task's own held-out data, whose loss has a chart elsewhere


@dataclass(frozen=True)
class MetricCurve:
    """A metric of one set of held-out data: (step, value) of the evaluations that count, and their extremes."""

    name: str
    of_set: str
    series: Series
    last: float
    lowest: float
    lowest_step: int
    highest: float
    highest_step: int


def metrics_of_records(records: Records) -> tuple[MetricCurve, ...]:
    """Return a curve for each metric of each set; of evaluations of one step the last counts."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for record in records.of(EvaluationRecord):
        named = {(text(name), OWN): value for name, value in table(record.metrics).items()}
        for of_set, measured in table(record.sets).items():
            each = {"loss": table(measured).get("loss"), **table(table(measured).get("metrics"))}
            named |= {(text(name), text(of_set)): value for name, value in each.items()}
        for key, value in named.items():
            if record.step is not None and (measured_value := number(value)) is not None:
                found.setdefault(key, {})[int(record.step)] = measured_value
    return tuple(_curve(name, of_set, sorted(values.items())) for (name, of_set), values in found.items())


def _curve(name: str, of_set: str, points: Sequence[tuple[int, float]]) -> MetricCurve:
    lowest, highest = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
    array = np.array(points, dtype=np.float64)
    return MetricCurve(
        name, of_set, thin(array[:, 0], array[:, 1]), points[-1][1], lowest[1], lowest[0], highest[1], highest[0]
    )
