"""What a task's optimizers and batches close to a plan, and why. Imports torch for optimizers of the user's alone."""

from __future__ import annotations

import dataclasses

from paceline.task.data.facts import DataFacts
from paceline.task.groups import check_groups
from paceline.task.optimizers import NOT_HOSTED, check_options, names_of, needs_no_wrapping, rule_of, use_of
from paceline.task.profile import ModelProfile
from paceline.task.task import OptimizerSpec, Task

RAGGED = (
    "task.data.collate may give each micro-batch another length: stages of a pipeline pass on tensors of one shape, "
    "and ranks that share a sequence cut it evenly; dp_replicate and dp_shard are open"
)
SPREADING = ("dp_shard", "tp", "pp", "cp", "ep")  # axes that put parameters, or parts of them, on different ranks


def close_for_task(profile: ModelProfile, task: Task, facts: DataFacts) -> ModelProfile:
    """Return the profile without what its optimizers and batches cannot do, such as sharding or resting on the host.

    Raises ConfigError for an optimizer that cannot be had, and for a group that names no parameter.
    """
    check_options(task.optimizer)
    ragged = {} if not getattr(task.data, "collate", None) else dict.fromkeys(("pp", "cp", "tp"), RAGGED)
    if task.optimizer.groups:
        check_groups(task.optimizer, parameter_names(task, facts))
    closed = {**ragged, **closed_by(task.optimizer)}
    return dataclasses.replace(profile, closed_axes={**(profile.closed_axes or {}), **closed}) if closed else profile


def closed_by(spec: OptimizerSpec) -> dict[str, str]:
    """Return axis -> why a spec's optimizers close it; "offload" is no axis, and closed all the same."""
    names = names_of(spec)
    closed = {} if needs_no_wrapping(names) else {"offload": NOT_HOSTED}
    for name in names:
        if rule_of(name) is None:
            from paceline.task.update_scope import scope_known

            use = scope_known(use_of(spec, name, spec.arguments if name == spec.name else {}))
            if use.scope == "model":
                because = (
                    f"the optimizer '{use.name}' updates a parameter by what others are, so it needs all of them "
                    "on one rank; dp_replicate is open"
                )
                closed |= dict.fromkeys(SPREADING, because)
    return closed


def parameter_names(task: Task, facts: DataFacts) -> list[str]:
    """Return the names of the parameters of a task's model, of a tied one all of them. Builds it, and imports torch."""
    from paceline.task.models.build import build_model
    from paceline.task.models.sizes import is_named
    from paceline.task.task import ModelSpec

    family = isinstance(task.model, ModelSpec) and is_named(task.model.name)
    model = build_model(
        task.model, facts.vocab or 0, facts.items_per_sample, task.seed, device="meta" if family else "cpu"
    )
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]
