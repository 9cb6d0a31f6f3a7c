"""Which plans a run may go on under without being started again."""

from __future__ import annotations

import dataclasses

from torch import nn

from paceline.errors import ConfigError
from paceline.spec.import_paths import is_import_path, load_object
from paceline.spec.plan import Plan
from paceline.spec.sync import refuse_resync
from paceline.spec.task import ModelSpec, Task


def refuse_replan(task: Task, before: Plan, plan: Plan) -> None:
    """Raise ConfigError where a run of the task under one plan cannot go on under another in the same process."""
    if plan.batch_samples != before.batch_samples:
        raise ConfigError(
            f"the new plan has a global batch of {plan.batch_samples} samples",
            f"the run's is {before.batch_samples}, and another one makes another experiment",
            f"a plan for {before.batch_samples} samples",
        )
    refuse_resync(dataclasses.asdict(before), plan.sync, plan.layout.dp_replicate)
    model = task.model
    if isinstance(model, ModelSpec) and is_import_path(model.name):
        model = load_object(model.name, "task.model.name")
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"another plan for the model {type(model).__name__}, which was given as an object",
            "the plan before has split its weights in place, so it cannot be built again",
            "give a function that returns the model, or start the run again: it resumes under the new plan",
        )
