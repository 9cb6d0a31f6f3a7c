"""The optimizer of a task, built over a model's (possibly sharded) parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.task.task import OptimizerSpec


def build_optimizer(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; weight decay applies to parameters of two or more dimensions (matrices, embeddings)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    by_kind: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in trained:
        # One fused update takes weights of one mesh only; those of experts lie on another than the rest.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_kind.setdefault((parameter.dim() >= 2, mesh), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": spec.weight_decay if decays else 0.0}
        for (decays, _), parameters in sorted(by_kind.items(), key=lambda item: not item[0][0])
    ]
    if spec.name == "adamw":
        return torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
    # torch 2.13 has no sharding strategy for `_fused_sgd_`; of `foreach` it has one for every operator.
    sharded = any(isinstance(parameter, DTensor) for parameter in trained)
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.beta1, fused=not sharded, foreach=sharded)
