"""The verdict while a run lives: one for each record of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec.journal.bound import VerdictRecord
from paceline.spec.journal.kinds import RanksRecord
from paceline.verdict.steps_seen import seen_of
from paceline.verdict.verdict import judge


def verdict_record(told: RanksRecord, outlook: Mapping[str, object] | None) -> VerdictRecord | None:
    """Return what bounds the steps that a record of all ranks is of; None where it tells no step's time."""
    seen = seen_of([told], {}, 0, told.ranks or 1)
    if seen is None:
        return None
    found = judge(seen, outlook)
    return VerdictRecord(
        step=told.step,
        bound=found.kind,
        healthy=found.healthy,
        because=found.because,
        shares={part.kind: round(part.share, 4) for part in found.parts},
        evidence=found.evidence,
        advice=found.advice,
        promise=found.promise,
        step_seconds=seen.whole_seconds,
        steps=found.steps,
    )
