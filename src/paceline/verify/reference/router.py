"""The reference's view of routers: what each chose, counted by hooks and added up plainly, and the bias that follows.

It reads the indices that a router returns, and the labels of the batch, and nothing that the run keeps of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.task.models.layers.loss import IGNORED
from paceline.task.models.moe import routers
from paceline.task.models.sizes import MoEConfig

RouterCounts = dict[str, torch.Tensor]


@contextmanager
def counted_choices(model: nn.Module) -> Iterator[RouterCounts]:
    """Yield tokens per expert, fp64 [experts] by router name, that grow with every forward pass inside the block."""
    counts: RouterCounts = {}
    ends: list[int] = []  # of each row of the batch at hand, the tokens up to its last label that counts

    def look(model: nn.Module, args: Any, kwargs: Any) -> None:
        ends[:] = [
            max((at + 1 for at, label in enumerate(row) if label != IGNORED), default=0)
            for row in kwargs["labels"].tolist()
        ]

    def hook(name: str) -> Any:
        def count(router: nn.Module, args: Any, output: Any) -> None:
            for row, end in zip(output[2].tolist(), ends, strict=True):
                for expert in (expert for chosen in row[:end] for expert in chosen):
                    counts[name][expert] += 1

        return count

    handles = [model.register_forward_pre_hook(look, with_kwargs=True)] if routers(model) else []
    for name, router in routers(model).items():
        counts[name] = torch.zeros(router.weight.shape[0], dtype=torch.float64)
        handles.append(router.register_forward_hook(hook(name)))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def move_biases(model: nn.Module, counts: RouterCounts) -> None:
    """Move each router's selection bias by the config's rate: up for experts below the mean load, down above it."""
    config = getattr(model, "config", None)
    for name, router in routers(model).items():
        if router.e_score_correction_bias is None:
            continue
        assert isinstance(config, MoEConfig)
        mean = counts[name].sum() / len(counts[name])
        for expert, load in enumerate(counts[name]):
            if load != mean:
                router.e_score_correction_bias[expert] += config.bias_rate if load < mean else -config.bias_rate
