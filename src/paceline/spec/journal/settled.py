"""What a run has settled for itself so far, as the journal says: a later start repeats the choice.

A start that ran out of memory has settled that the next one begins with half its micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.errors import tells_exhausted
from paceline.spec.journal.kinds import DecisionRecord, RunEnded
from paceline.spec.journal.reading import read_records
from paceline.spec.journal.records.decided import MICRO_BATCH
from paceline.spec.plan import Plan


def conditions_of(plan: Plan) -> dict[str, object]:
    """Return what a decision on the micro-batch holds for: another layout has a memory of its own."""
    return {"layout": str(plan.layout), "batch_samples": plan.batch_samples, "precision": plan.precision,
            "recompute": plan.recompute, "offload": plan.offload,
            **({"frozen": plan.frozen} if plan.frozen != "as-model" else {})}  # fmt: skip


def settled_micro_batch(run_dir: Path, plan: Plan) -> int | None:
    """Return the micro-batch that the run has last settled on for such a plan; None where it has not."""
    found, conditions = None, conditions_of(plan)
    for record in read_records(run_dir):
        evidence = None
        if isinstance(record, DecisionRecord) and record.what == MICRO_BATCH:
            evidence = record.evidence
        elif isinstance(record, RunEnded) and record.error and tells_exhausted(record.error):
            evidence = record.error.get("evidence")
        if isinstance(evidence, Mapping) and evidence.get("conditions") == conditions:
            found = int(evidence["micro_batch"])
    return found
