"""Experts in the way of transformers, called with the choices of every token, as those of `spread_experts` are.

transformers' modules get all tokens, the indices of their experts and the weights of these, and return weighted sums.
Ranks exchange single rows instead: each expert is asked with a weight of one, and the sum is made where the token is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.task.models.layers.products import by_expert

Exchanged = Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], Tensor]


class RoutedForward:
    """The forward pass of a module of transformers whose experts are spread over ranks."""

    def __init__(self, experts: Any, exchanged: Exchanged) -> None:
        """`exchanged(compute, rows, counts)` has rows [rows, hidden], sorted by expert, computed on their ranks."""
        self._experts, self._count = experts, int(experts.num_experts)
        self._inner, self._exchanged = experts.forward, exchanged
        self._signature = inspect.signature(self._inner)

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Return [tokens, hidden] for (hidden states [tokens, hidden], indices and weights [tokens, top_k])."""
        hidden, chosen, weights = self._signature.bind(*args, **kwargs).arguments.values()
        top_k = chosen.shape[-1]
        order, counts = by_expert(chosen, self._count)
        results = self._exchanged(self._compute, hidden[order // top_k], counts)
        results = results[order.argsort()].unflatten(0, (-1, top_k))
        return (results * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of this rank's experts for rows that are sorted by expert."""
        if not len(rows):  # all weights get a gradient of zero, and the ranks' backward passes meet
            return rows + sum(weight.sum() for weight in self._experts._parameters.values()) * 0
        numbers = torch.arange(len(counts), device=rows.device)
        own = numbers.repeat_interleave(counts, output_size=len(rows)).unsqueeze(1)
        self._experts.num_experts = len(counts)
        try:
            return self._inner(rows, own, rows.new_ones(len(rows), 1))
        finally:
            self._experts.num_experts = self._count
