"""The optimizer of a task, built over a model's (possibly sharded) parameters."""

from __future__ import annotations

import torch
from torch import nn

from paceline.task.task import OptimizerSpec


def build_optimizer(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; weight decay applies to parameters of two or more dimensions (matrices, embeddings)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if spec.name == "adamw":
        return torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.beta1, fused=True)
