"""The optimizer of a task, built over a model's (possibly sharded) parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError, NeedsWholeWeights
from paceline.run.updates.several_rules import JoinedOptimizer
from paceline.spec.optimizers import Use, needs_no_wrapping
from paceline.spec.steps.update import OptimizerSpec
from paceline.task.models.held import is_spread
from paceline.task.optimizer.eager import eager
from paceline.task.optimizer.groups import Treatment, Treatments
from paceline.task.optimizer.update_scope import scope_known
from paceline.task.plain_names import named_parameters

Names = Mapping[str, tuple[str, ...]]


def build_optimizer(
    spec: OptimizerSpec,
    model: nn.Module,
    names: Names | None = None,
    trained: Iterable[nn.Parameter] | None = None,
    apart: Sequence[Iterable[nn.Parameter]] = (),
    scales: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of a model's parameters, or of those of them that are `trained`.

    Each parameter is treated as the first group of the spec that matches one of its names says; by default weight decay
    applies to parameters of two or more dimensions (matrices, embeddings). `names` are all names of a parameter by any
    of them, for a stage of a pipeline that knows a tied weight by one name alone. Parameters that are `apart` have
    optimizers of their own, as those of several objectives. `scales` are factors on learning rates, by names.
    """
    chosen = None if trained is None else set(trained)
    at = {parameter: number for number, own in enumerate(apart) for parameter in own}
    treatments = [Treatments(spec, scales or {}) for _ in range(max(1, len(apart)))]
    scopes: dict[int, Use] = {}
    by_kind: dict[tuple[Any, ...], tuple[Treatment, list[nn.Parameter]]] = {}
    for name, parameter in named_parameters(model):
        if not parameter.requires_grad or (chosen is not None and parameter not in chosen):
            continue
        treatment = treatments[at.get(parameter, 0)].of((names or {}).get(name, (name,)), parameter.dim())
        if id(treatment.use) not in scopes:
            scopes[id(treatment.use)] = scope_known(treatment.use)
        # One fused update takes weights of one mesh only; those of experts lie on another than the rest.
        mesh = parameter.device_mesh if is_spread(parameter) else None
        key = (treatment.number, id(treatment.use), treatment.weight_decay, treatment.lr_scale, mesh)
        by_kind.setdefault(key, (treatment, []))[1].append(parameter)
    groups = [_group(spec, treatment, scopes, parameters) for treatment, parameters in by_kind.values()]
    groups.sort(key=lambda group: group.get("weight_decay") or 0.0)
    if not groups:
        raise ConfigError("the optimizer has no parameter", "nothing in the model is trained", "requires_grad = True")
    if needs_no_wrapping({group["use"].name for group in groups}):
        return _of_torch(groups)
    return JoinedOptimizer(groups)


def all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter by any of them: several where a weight is tied."""
    by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named_parameters(model, every=True):
        by_parameter.setdefault(parameter, []).append(name)
    return {name: tuple(found) for found in by_parameter.values() for name in found}


def _group(
    spec: OptimizerSpec, treatment: Treatment, scopes: Mapping[int, Use], parameters: list[nn.Parameter]
) -> dict[str, Any]:
    decay = {} if treatment.weight_decay is None else {"weight_decay": treatment.weight_decay}
    use, scale = scopes[id(treatment.use)], treatment.lr_scale
    if use.scope == "model" and any(is_spread(parameter) for parameter in parameters):
        raise NeedsWholeWeights(
            f"the optimizer '{use.name}' cannot be sharded",
            "its update of a parameter depends on other parameters, which are spread over ranks",
            "plan.dp_shard = 1 and no axis but dp_replicate",
        )
    return {"params": parameters, "use": use, "lr": spec.lr * scale, "lr_scale": scale, **decay}


def _of_torch(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return one optimizer of torch over the model's own tensors."""
    use = groups[0]["use"]
    sharded = any(is_spread(parameter) for group in groups for parameter in group["params"])
    # torch 2.13 has no sharding strategy for `_fused_sgd_`; of `foreach` it has one for every operator.
    # No fused kernel takes complex weights.
    has_complex = any(parameter.is_complex() for group in groups for parameter in group["params"])
    by_foreach = (sharded and use.name == "sgd") or has_complex
    ways = {"fused": not by_foreach, "foreach": by_foreach}
    ours = [{**group["use"].arguments, **group} for group in groups]
    plain = [{name: value for name, value in group.items() if name != "use"} for group in ours]
    given = {name for group in ours for name in group} & {"fused", "foreach"}
    optimizer: torch.optim.Optimizer = eager(use.factory)(plain, lr=groups[0]["lr"], **({} if given else ways))
    return optimizer
