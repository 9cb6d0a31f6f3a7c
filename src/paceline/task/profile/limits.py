"""Which axes and settings a task's optimizers and batches close to a plan, and why. Imports torch for the user's."""

from __future__ import annotations

import dataclasses

from paceline.errors import ConfigError
from paceline.spec.adapt.preference import DPO
from paceline.spec.optimizers import NOT_OFFLOADED, check_options, names_of, needs_no_wrapping, rule_of, use_of
from paceline.spec.profile import ModelProfile
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import ModelSpec, Task
from paceline.task.data.facts import DataFacts
from paceline.task.optimizer.groups import check_groups
from paceline.task.turns import ALONE, CLOSED, ROUTED, check_takers

RAGGED = (
    "task.data.collate may give each micro-batch another length: stages of a pipeline pass on tensors of one shape, "
    "and ranks that share a sequence cut it evenly; dp_replicate and dp_shard are open"
)
TWICE = "the objective 'dpo' calls the model twice, with adapters and without; stages of a pipeline run once"
REFERENCED = "paceline.task.adapt.referenced:with_reference"
FILLED_UP = (
    "rows are filled up to the longest of their micro-batch: stages of a pipeline pass on tensors of one shape, and "
    "ranks that share a sequence cut it evenly; dp_replicate and dp_shard are open"
)
SPREADING = ("dp_shard", "tp", "pp", "cp", "ep")  # axes that put parameters, or parts of them, on different ranks


def close_for_task(profile: ModelProfile, task: Task, facts: DataFacts) -> ModelProfile:
    """Return the profile without what its optimizers, batches and turns cannot do, such as sharding.

    Raises ConfigError for an optimizer that cannot be had, and for a group that names no parameter.
    """
    check_options(task.optimizer)
    check_reference(task)
    ragged = {} if not getattr(task.data, "collate", None) else dict.fromkeys(("pp", "cp", "tp"), RAGGED)
    if facts.longest:
        whole = profile.tensor_limits is None or not profile.tensor_limits.splits_sequence
        ragged = dict.fromkeys(("pp", "cp") if whole else ("pp", "cp", "tp"), FILLED_UP)
    closed = {**ragged, **closed_by(task.optimizer), **({"pp": TWICE} if task.objective == DPO else {})}
    if task.optimizer.groups or task.turns:
        trained, every_name = parameter_names(task, facts)
        if task.optimizer.groups:
            check_groups(task.optimizer, every_name)
        if task.turns:
            check_takers(task, trained, every_name)
            closed |= closed_by_turns(profile)
    return dataclasses.replace(profile, closed_axes={**(profile.closed_axes or {}), **closed}) if closed else profile


def check_reference(task: Task) -> None:
    """Raise ConfigError for preference pairs of a model that has no frozen reference to be held against."""
    if task.objective != DPO:
        return
    if task.preference.loss == "ipo" and task.preference.label_smoothing:
        raise ConfigError(
            "task.preference.label_smoothing is without effect", "the loss 'ipo' has none", "leave it out"
        )
    has_copy = isinstance(task.model, ModelSpec) and task.model.name == REFERENCED
    if task.train or task.adapter.is_none != has_copy:
        because = "task.train changes a part of it" if task.train else (
            "adapters have their frozen base, and need no copy" if has_copy else
            "without adapters all of it is trained, and no copy can be made of a model that is given as an object"
        )  # fmt: skip
        raise ConfigError(
            "task.objective = 'dpo' needs a frozen reference: the base of adapters, or a copy of the model", because,
            "task.adapter.kind = 'lora' and no task.train, or a named model or folder that is trained whole",
        )  # fmt: skip


def closed_by(spec: OptimizerSpec) -> dict[str, str]:
    """Return axis -> why a spec's optimizers close it; "offload" is no axis, and closed all the same."""
    names = names_of(spec)
    closed = {} if needs_no_wrapping(names) else {"offload": NOT_OFFLOADED}
    for name in names:
        if rule_of(name) is None:
            from paceline.task.optimizer.update_scope import scope_known

            use = scope_known(use_of(spec, name, spec.arguments if name == spec.name else {}))
            if use.scope == "model":
                because = (
                    f"the optimizer '{use.name}' updates a parameter by what others are, so it needs all of them "
                    "on one rank; dp_replicate is open"
                )
                closed |= dict.fromkeys(SPREADING, because)
    return closed


def closed_by_turns(profile: ModelProfile) -> dict[str, str]:
    """Return axis -> why several objectives close it. Raises ConfigError for a model that they cannot train."""
    if profile.experts:
        raise ConfigError("task.turns with a model with experts", ROUTED, "a model without experts")
    return dict.fromkeys(ALONE, CLOSED)


def parameter_names(task: Task, facts: DataFacts) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return all names of each trained parameter of a task's model by one of them, and all names of all parameters.

    Builds the model, and imports torch.
    """
    from paceline.spec.task import ModelSpec
    from paceline.task.models.build import build_model
    from paceline.task.models.sizes import is_named

    family = isinstance(task.model, ModelSpec) and is_named(task.model.name)
    device = "meta" if family else "cpu"
    model = build_model(task.model, facts.vocab or 0, facts.items_per_sample, task.seed, device, task.adaptation)
    named = list(model.named_parameters(remove_duplicate=False))
    trained: dict[int, list[str]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            trained.setdefault(id(parameter), []).append(name)
    return {names[0]: tuple(names) for names in trained.values()}, [name for name, _ in named]
