"""Whether a task's loss is known to be a sum over rows, so that a batch may be cut without a proof of that."""

from __future__ import annotations

from paceline.spec.task import ModelSpec, Task
from paceline.task.models.sizes import is_named

OURS = ("auto", "next_token", "classification")  # objectives that are sums for every model of ours


def is_known_sum(task: Task) -> bool:
    """Return whether both the model and the objective are ours. Of any other the proof cuts a batch and compares."""
    named = isinstance(task.model, ModelSpec) and is_named(task.model.name)
    return named and task.objective in OURS and not task.turns
