"""The kinds of record that a journal holds, and a line of a journal as the record that it is."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec.journal.bound import TraceRecord, VerdictRecord
from paceline.spec.journal.record import Record, read
from paceline.spec.journal.records.of_faults import (
    CheckpointRecord,
    FaultRecord,
    InjectedRecord,
    RecoveryRecord,
    ReplayRecord,
)
from paceline.spec.journal.records.of_starts import (
    ClockRecord,
    DecisionRecord,
    RunEnded,
    RunStarted,
    VerifyRecord,
)
from paceline.spec.journal.records.of_training import (
    EvaluationRecord,
    LoggedRecord,
    MemoryRecord,
    MovedRecord,
    RanksRecord,
    SelectionRecord,
    SourcesRecord,
    StepRecord,
    WrittenRecord,
)
from paceline.spec.journal.watching import AlertRecord, HealthSample, NodeSample

RECORDS: tuple[type[Record], ...] = (
    RunStarted, StepRecord, RanksRecord, VerdictRecord, TraceRecord, EvaluationRecord, WrittenRecord, LoggedRecord,
    SourcesRecord, SelectionRecord, MemoryRecord, MovedRecord, VerifyRecord, DecisionRecord, CheckpointRecord,
    ReplayRecord, FaultRecord, RecoveryRecord, InjectedRecord, ClockRecord, NodeSample, HealthSample,
    RunEnded,
    AlertRecord,
)  # fmt: skip
BY_KIND = {kind.KIND: kind for kind in RECORDS}


def parse(line: Mapping[str, object]) -> Record | None:
    """Return a line of a journal as the record that it is; None for a kind that this version does not know."""
    kind = BY_KIND.get(str(line.get("kind")))
    return None if kind is None else read(kind, line)
