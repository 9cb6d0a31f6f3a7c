"""CostAdvice: one change that would make a run cheaper, the money that the change would save, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.history.goodput import MeasuredGoodput
from paceline.history.records import Records
from paceline.spec.journal.kinds import RunStarted
from paceline.verdict.verdict import BoundVerdict

SURE = ("measured", "likely", "rough")  # how sure a saving is: the surest first
LEAST_SHARE = 0.01  # of a run's cost, below which nothing is advised


@dataclass(frozen=True)
class CostAdvice:
    """What to change. `saves` is the part of the run's cost that it would save, with the `amounts` that this is.

    `kind` is one of `device`, `idle`, `checkpoints`, `micro_batch`, `region`, `hours`; `sure` one of SURE.
    """

    kind: str
    text: str
    try_: str
    of: str  # what is saved: `cost` (device-hours, with money and energy), `usd` or `carbon`
    saves: float
    sure: str
    because: str
    amounts: Mapping[str, float] = field(default_factory=dict)  # usd, kwh, carbon_kg, device_hours, as far as known


@dataclass(frozen=True)
class AdviceEvidence:
    """What advice is made from: the records, the start that says most, the verdict on steps and the goodput."""

    records: Records
    start: RunStarted
    bound: BoundVerdict | None
    goodput: MeasuredGoodput
    spent: Mapping[str, float]  # usd, kwh, carbon_g and device_seconds so far

    def figure(self, *keys: str) -> float | None:
        """Return a number of the start's cluster or plan, such as ("cluster", "devices")."""
        found: Any = vars(self.start)
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        known = isinstance(found, int | float) and not isinstance(found, bool)
        return float(found) if known else None
