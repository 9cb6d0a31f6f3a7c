"""Training as a user would write it with torch alone. Nothing of Paceline is in it but the order of the samples."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from paceline.task.data.order.permutation import sample_ids

LR, DECAY, CLIP, BETAS, SEED = 1e-3, 0.1, 1.0, (0.9, 0.95), 7


def named(path: str) -> Any:
    """Return the object of `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def trained(
    model: str,
    arguments: dict[str, Any],
    data: str,
    objective: str,
    batch: int,
    steps: int,
    turns: Sequence[tuple[str, str, str]] = (),
) -> dict[str, Any]:
    """Return {"losses": of every step, "state": the parameters at the end} of fp64 training on whole batches.

    `turns` are (name, objective, pattern of parameters) of several losses that are minimised one after the other.
    """
    torch.manual_seed(SEED)
    module: nn.Module = named(model)(**arguments)
    module = _in_double(module).train()
    for part in module.modules():
        if hasattr(getattr(part, "config", None), "_experts_implementation"):
            part.config._experts_implementation = "eager"  # torch's grouped products know no fp64
    rows, losses = named(data)(), []
    updates = []
    for _, path, pattern in turns or (("", objective, "*"),):
        own = [p for name, p in module.named_parameters() if p.requires_grad and fnmatchcase(name, pattern)]
        updates.append((_loss_of(path), own, _adamw(own)))
    for step in range(steps):
        ids = sample_ids(SEED, np.arange(step * batch, (step + 1) * batch), len(rows))
        read = tree_map(_double, default_collate([rows[int(index)] for index in ids]))
        for loss_of, own, optimizer in updates:
            optimizer.zero_grad()
            total, count = loss_of(module, read)
            (total / count).backward()
            nn.utils.clip_grad_norm_([p for p in own if p.grad is not None], CLIP)
            optimizer.step()
            losses.append(float(total.detach() / count))
    return {"losses": losses, "state": {name: p.detach().clone() for name, p in module.named_parameters()}}


def _loss_of(objective: str) -> Any:
    return {"classification": classified, "next_token": foretold}.get(objective) or named(objective)


def _adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=BETAS, eps=1e-8)


def foretold(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of the next tokens, and their number."""
    output = model(batch["tokens"])
    logits, labels = getattr(output, "logits", output), batch["labels"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of the classes, and the number of rows."""
    output = model(batch[0])
    return F.cross_entropy(getattr(output, "logits", output), batch[1], reduction="sum"), torch.tensor(len(batch[1]))


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _in_double(module: nn.Module) -> nn.Module:
    """Return the module with real numbers in fp64 and complex ones in complex128; `.double()` drops imaginary parts."""
    return module._apply(lambda t: t.to(torch.complex128) if t.is_complex() else _double(t))
