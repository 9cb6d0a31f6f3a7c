"""What a run has settled for itself so far, as its journal says: a later start repeats it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.reading import read_records
from paceline.spec.plan import Plan

MICRO_BATCH = "micro_batch"  # the `what` of decisions on it


def conditions_of(plan: Plan) -> dict[str, Any]:
    """Return what a decision on the micro-batch holds for: another layout has a memory of its own."""
    return {"layout": str(plan.layout), "batch_samples": plan.batch_samples, "precision": plan.precision,
            "recompute": plan.recompute, "offload": plan.offload}  # fmt: skip


def settled_micro_batch(run_dir: Path, plan: Plan) -> int | None:
    """Return the micro-batch that the run has last settled on for such a plan; None where it has not."""
    found, conditions = None, conditions_of(plan)
    for record in read_records(run_dir):
        if not isinstance(record, DecisionRecord) or record.what != MICRO_BATCH:
            continue
        if isinstance(record.evidence, Mapping) and record.evidence.get("conditions") == conditions:
            found = int(record.evidence["micro_batch"])
    return found
