"""Stacked experts as transformers has them, spread over ranks: they are called with tokens and each token's choices.

Ours are called with rows sorted by expert and counts. Tokens are sorted into such rows, the ranks of the experts
compute them, and the results are weighted and added up where the tokens came from. On its rank a module computes rows
with its own forward pass, in which every row has one choice of weight one: activations, biases and memory order stay
its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OverRanks = Callable[[Tensor, Tensor], Tensor]  # (rows, counts) -> a result for each row


def over_rows(module: Any, forward: Callable[..., Tensor], ranks: int) -> OverRanks:
    """Return the module's forward pass over its own experts for rows [tokens, width] sorted by expert, and counts."""
    module.num_experts //= ranks  # what its forward pass counts up to

    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        chosen = torch.repeat_interleave(counts)[:, None]
        results = forward(rows, chosen, torch.ones_like(chosen, dtype=rows.dtype))
        # A rank without rows, or an expert without, has a gradient of zero all the same, and all send gradients back.
        reached = sum(weight.reshape(-1)[:1].sum() for weight in module._parameters.values() if weight is not None)
        return results + 0.0 * (rows + reached)

    return compute


def by_choices(over_ranks: OverRanks, experts: int, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of what `experts` spread over ranks make of tokens: [tokens, width].

    `choices` int64 and `weights` [tokens, top_k] are the router's.
    """
    flat = choices.reshape(-1)
    order = flat.argsort(stable=True)
    token = order // choices.shape[-1]
    results = over_ranks(hidden[token], torch.bincount(flat, minlength=experts))
    return torch.zeros_like(hidden).index_add(0, token, results * weights.reshape(-1)[order, None].to(results.dtype))
