"""What of a record is a number over steps, by the names under which tools show it."""

from __future__ import annotations

import math

from paceline.spec.journal.bound import VerdictRecord
from paceline.spec.journal.kinds import CheckpointRecord, EvaluationRecord, LoggedRecord, StepRecord
from paceline.spec.journal.record import Record, number


def values_of(record: Record) -> dict[str, float]:
    """Return the finite numbers of a record, by name; none of records that have no step."""
    found: dict[str, float | None] = {}
    if isinstance(record, StepRecord):
        found = {
            "loss/training": record.loss, "optimisation/grad_norm": record.grad_norm,
            "optimisation/learning_rate": record.lr, "optimisation/loss_scale": record.loss_scale,
            "speed/tokens_per_second": record.tokens_per_second, "memory/peak_bytes": record.peak_bytes,
        }  # fmt: skip
        found |= {f"seconds/{name}": value for name, value in record.seconds.items()}
        for name, turn in (record.turns or {}).items():
            found[f"loss/{name}"] = number(turn.get("loss")) if isinstance(turn, dict) else None
    elif isinstance(record, EvaluationRecord):
        found = {"loss/held_out": record.loss}
        found |= {f"held_out/{name}": number(value) for name, value in (record.metrics or {}).items()}
        for name, of_set in (record.sets or {}).items():
            own = {"loss": of_set.get("loss"), **(of_set.get("metrics") or {})}
            found |= {f"held_out.{name}/{what}": number(value) for what, value in own.items()}
    elif isinstance(record, LoggedRecord):
        found = {f"{record.by}/{name}": value for name, value in record.values.items()}
    elif isinstance(record, VerdictRecord):
        found = {f"bound/{name}": value for name, value in record.shares.items()}
    elif isinstance(record, CheckpointRecord):
        found = {"checkpoint/stall_seconds": record.cost_seconds, "checkpoint/bytes": number(record.bytes)}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def step_of(record: Record) -> int | None:
    """Return the step that a record is of."""
    step = getattr(record, "step", None)
    return step if isinstance(step, int) else None
