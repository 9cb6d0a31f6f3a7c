"""A step's rate as the forecast counts it, also of journals whose rate was of what the loss counts.

Versions before 2026-11-29 evening wrote `weight` over `seconds.total` as a step's `tokens_per_second`: of conversations
the answers alone, where the forecast has all tokens of a row. Such a step is known by its own figures, so one journal
may hold starts of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.record import number
from paceline.spec.steps.selection import NOTHING

SAME = 1e-6  # relative: a journal's numbers are printed in full


@dataclass(frozen=True)
class ForecastItems:
    """How many items the forecast of a start counts: for a sample, or for a step where samples differ in length.

    NaN is unknown, as of a start without a forecast, and of a step that reads more samples than it trains on.
    """

    of_sample: float = math.nan
    of_step: float = math.nan

    def rate(self, rate: float, samples: float, weight: float, seconds: float) -> float:
        """Return a step's rate in items/s: all that it computed, where the recorded rate is the loss's items alone."""
        items = self.of_step if math.isfinite(self.of_step) else self.of_sample * samples
        is_of_loss = math.isclose(rate * seconds, weight, rel_tol=SAME)
        return items / seconds if is_of_loss and math.isfinite(items) and seconds > 0 else rate


UNKNOWN_ITEMS = ForecastItems()


def forecast_items(start: RunStarted) -> ForecastItems:
    """Return how many items a start's forecast counts."""
    task, batch = _table(start.spec.get("task")), _number(start.plan.get("batch_samples"))
    step = _number(_table(start.forecast.get("step_seconds")).get("value"))
    items = _number(start.forecast.get("tokens_per_second")) * step
    if start.facts.get("unit") != "tokens" or not items > 0 or not batch > 0 or _selects(task):
        return UNKNOWN_ITEMS
    return ForecastItems(of_step=items) if task.get("batch_rows") == "by_length" else ForecastItems(items / batch)


def rated(line: Mapping[str, Any], items: ForecastItems) -> Mapping[str, Any]:
    """Return a step's line with its rate over all that it computed."""
    recorded = line.get("tokens_per_second")
    if items is UNKNOWN_ITEMS or not isinstance(recorded, float):
        return line
    samples = _number(line.get("position_after")) - _number(line.get("position_before"))
    rate = items.rate(recorded, samples, _number(line.get("weight")), _number(_table(line.get("seconds")).get("total")))
    return line if rate == recorded else {**line, "tokens_per_second": rate}


def _selects(task: Mapping[str, Any]) -> bool:
    return _table(task.get("selection")).get("by", NOTHING) != NOTHING


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float:
    known = number(value)
    return math.nan if known is None else known
