"""The kinds of record that whoever watches a run writes beside its starts (spec/journal/beside.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.spec.journal.record import Record, Table, Told


@dataclass(frozen=True)
class AlertRecord(Record):
    """An alert that fires, or is over. In `RUN/journal/alerts-0001.jsonl`, a file for each watch over the run."""

    KIND: ClassVar[str] = "alert"

    rule: Annotated[str, Told("the rule, of those that `paceline alerts list` names")]
    severity: Annotated[str, Told("`info`, `warning` or `critical`")]
    state: Annotated[str, Told("`firing`, or `resolved`")]
    title: Annotated[str, Told("what is the matter, in one line")]
    evidence: Annotated[Table, Told("the numbers behind it")]
    advice: Annotated[str, Told("what to do about it")]
    step: Annotated[int | None, Told("the last step on record", if_any=True)] = None
    sent: Annotated[bool | None, Told("whether it was handed to the sinks: silenced ones are not", if_any=True)] = None
