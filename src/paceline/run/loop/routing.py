"""Routing: what a step's routers did, over all ranks, and the selection biases that follow from it.

Counts are sums over the tokens of the global batch, so neither the record nor a bias depends on the layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.spec.plan import Plan
from paceline.task.models.layers.balance import bias_step
from paceline.task.models.moe import BALANCE, ENTROPY, MoEDecoder, routers_by_place

LISTED_EXPERTS = 512  # the journal lists the load of every expert up to so many of them over all layers


@dataclass(frozen=True)
class RouterStats:
    """What the routers of one step did, over all ranks; a list entry per layer with experts."""

    counts: tuple[tuple[int, ...], ...]  # tokens that each expert got
    entropy: tuple[float, ...]  # mean over tokens of the router's entropy, 1 where all experts are equally likely
    balance: float  # mean balance loss per counted item and layer; top_k where the load is even
    dropped: int = 0  # tokens that found no place: there is no capacity, so none

    @property
    def loads(self) -> list[list[float]]:
        """The load of each expert, layer by layer, over an even load: the mean of a layer is 1."""
        return [[count * len(row) / max(1, sum(row)) for count in row] for row in self.counts]

    @property
    def load_min(self) -> float:
        """The load of the emptiest expert."""
        return min(map(min, self.loads))

    def as_dict(self) -> dict[str, object]:
        """Return what the journal keeps."""
        loads = self.loads
        fields: dict[str, object] = {
            "load_max": max(map(max, loads)), "load_min": self.load_min,
            "entropy": sum(self.entropy) / len(self.entropy), "balance": self.balance, "dropped": self.dropped,
        }  # fmt: skip
        if sum(map(len, loads)) <= LISTED_EXPERTS:
            fields["load"] = [[round(load, 4) for load in row] for row in loads]
        return fields


@dataclass
class RouterWatch:
    """Adds up what the routers did in a step's micro-batches and updates their selection biases after it.

    Of a pipeline's model a rank holds some layers; the sums of the others are zero on it.
    """

    model: MoEDecoder
    plan: Plan
    _total: torch.Tensor | None = field(default=None, init=False)

    def collect(self, ran: nn.Module) -> None:
        """Add the forward pass of a model, or of a stage of it. Called for micro-batches that count, once each."""
        assert isinstance(ran, MoEDecoder) and ran.routed is not None
        self._total = ran.routed if self._total is None else self._total + ran.routed

    def take(self) -> torch.Tensor:
        """Return this rank's sums in fp64, flat, where the model is, and forget them."""
        shape = (self.model.config.routed_layers, self.model.config.experts + 2)
        total, self._total = self._total, None
        return (torch.zeros(shape, dtype=torch.float64) if total is None else total).flatten()

    def finish(self, sums: torch.Tensor, known: list[float], items: float, updated: bool) -> RouterStats:
        """Return the step's statistics from the sums over all ranks, having moved the biases where weights moved.

        `sums` are on the device, where biases follow from them, and `known` are the same on the host. `items` is the
        step's weight. Ranks of a tensor-parallel group have routed the same tokens.
        """
        config = self.model.config
        if updated:
            loads = self._table(sums)[:, :ENTROPY].round()
            for place, router in routers_by_place(self.model).items():
                bias = router.e_score_correction_bias
                if bias is not None:
                    bias_step(bias, loads[place], config.bias_rate)
        table = self._table(np.array(known))
        counts = table[:, :ENTROPY].round()
        tokens = counts.sum(axis=1) / config.top_k
        entropy = table[:, ENTROPY] / tokens / math.log(config.experts) if config.experts > 1 else table[:, ENTROPY] * 0
        return RouterStats(
            counts=tuple(tuple(int(count) for count in row) for row in counts.tolist()),
            entropy=tuple(entropy.tolist()),
            balance=float(table[:, BALANCE].mean()) / items,
        )

    def _table(self, sums: Any) -> Any:
        """Return flat sums, a tensor or an array, with a row for each layer, every token counted once."""
        return sums.reshape(self.model.config.routed_layers, -1) / self.plan.layout.tp


def watch_routing(model: nn.Module, plan: Plan) -> RouterWatch | None:
    """Return what watches a model's routers, or None where it has none."""
    return RouterWatch(model, plan) if isinstance(model, MoEDecoder) else None
