"""PlannedRecord: what a run's journal says of its plan, as the planner hands it to the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.spec.journal.kinds import DecisionRecord, VerifyRecord
from paceline.spec.journal.record import Table, Words


@dataclass(frozen=True)
class PlannedRecord:
    """What is known before a run starts: fields of its RunStarted record, and the decisions and the proof behind it."""

    cluster: Table = field(default_factory=dict)
    forecast: Table = field(default_factory=dict)
    placement: Table = field(default_factory=dict)
    facts: Table = field(default_factory=dict)
    parameters: int | None = None
    profile: Table = field(default_factory=dict)
    optimizer: str = ""
    headline: Words = ()
    provenance: Table = field(default_factory=dict)
    outlook: Table = field(default_factory=dict)
    decisions: tuple[DecisionRecord, ...] = ()
    verify: VerifyRecord | None = None


def planned_from_dict(data: Mapping[str, Any]) -> PlannedRecord:
    """Return the record that `dataclasses.asdict` made plain data of."""
    decisions = tuple(DecisionRecord(**each) for each in data["decisions"])
    verify = VerifyRecord(**data["verify"]) if data["verify"] else None
    return PlannedRecord(**{**data, "headline": tuple(data["headline"]), "decisions": decisions, "verify": verify})
