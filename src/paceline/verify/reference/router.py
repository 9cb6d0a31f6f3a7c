"""The reference's view of routers: what each chose, counted by hooks and added up plainly, and the bias that follows.

It reads the probabilities and indices that a router returns, and the labels of the batch, and nothing that the run
keeps of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.spec.data.labels import IGNORED
from paceline.task.models.moe import routers
from paceline.task.models.shape import MoEConfig

RouterCounts = dict[str, torch.Tensor]


@dataclass
class RouterSums:
    """Sums over the tokens of a step, by router: of entropies in nats, and of balance losses times counted labels."""

    entropy: dict[str, float] = field(default_factory=dict)
    balance: dict[str, float] = field(default_factory=dict)

    def numbers(self, counts: RouterCounts, top_k: int, items: float) -> dict[str, float]:
        """Return what a step tells of its routers, by name: each one's entropy, 1 where all experts are equally likely,
        and the mean balance loss per item and router. Empty for a model without experts.
        """
        if not self.entropy:
            return {}
        most = {name: math.log(len(each)) or 1.0 for name, each in counts.items()}
        tokens = {name: float(each.sum()) / top_k for name, each in counts.items()}
        told = {f"entropy of {name}": found / tokens[name] / most[name] for name, found in self.entropy.items()}
        return {**told, BALANCE: sum(self.balance.values()) / len(self.balance) / items}


BALANCE = "balance of routers"


@contextmanager
def counted_choices(model: nn.Module, sums: RouterSums | None = None) -> Iterator[RouterCounts]:
    """Yield tokens per expert, fp64 [experts] by router name, that grow with every forward pass inside the block.

    `sums` grow with them.
    """
    counts: RouterCounts = {}
    ends: list[int] = []  # of each row of the batch at hand, the tokens up to its last label that counts
    items: list[int] = []  # and its labels that count

    def look(model: nn.Module, args: object, kwargs: Any) -> None:
        rows = kwargs["labels"].tolist()
        ends[:] = [max((at + 1 for at, label in enumerate(row) if label != IGNORED), default=0) for row in rows]
        items[:] = [sum(label != IGNORED for label in row) for row in rows]

    def hook(name: str) -> Any:
        def count(router: nn.Module, args: object, output: Any) -> None:
            for row, end in zip(output[2].tolist(), ends, strict=True):
                for expert in (expert for chosen in row[:end] for expert in chosen):
                    counts[name][expert] += 1
            if sums is not None:
                _add(sums, name, output[0].detach().double(), output[2], ends, items)

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


def _add(
    sums: RouterSums, name: str, probabilities: torch.Tensor, chosen: torch.Tensor, ends: list[int], items: list[int]
) -> None:
    """Add the rows of a forward pass: -sum(p log p) over tokens, and E / T^2 sum_e(n_e sum_t(p_te)) times the labels.

    `probabilities` are [rows, seq, experts]; n_e of the row's T x top_k choices are of expert e.
    """
    for row, end in enumerate(ends):
        if not end:
            continue
        each = probabilities[row, :end]
        entropy = -(each * each.clamp(min=1e-300).log()).sum()
        counts = torch.bincount(chosen[row, :end].flatten(), minlength=each.shape[1]).double()
        balance = each.shape[1] / end**2 * (counts * each.sum(0)).sum() * items[row]
        sums.entropy[name] = sums.entropy.get(name, 0.0) + float(entropy)
        sums.balance[name] = sums.balance.get(name, 0.0) + float(balance)


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
