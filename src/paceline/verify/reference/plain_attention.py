"""Attention written plainly, for references: whole rows of scores, a softmax, a product; no kernel, no ring.

Scores of a few queries exist at a time, and are computed again for the backward pass, so that sequences of their real
length fit into memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.task.models.layers.attention import CausalAttention

QUERIES = 256  # whose scores exist at a time


def attend_plainly(model: nn.Module) -> None:
    """Have the model's attention computed plainly, in place."""
    for module in model.modules():
        if isinstance(module, CausalAttention):
            module.over_ranks = plain_attention


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return [rows, heads, queries, head_dim] for q of that shape and k, v [rows, kv_heads, keys, head_dim].

    `mask` is bool [rows, 1, queries, keys], True where a query sees a key; None is plain causal attention.
    """
    of_head = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])  # query heads share key heads
    keys, values = k[:, of_head], v[:, of_head]
    places = torch.arange(k.shape[2], device=q.device)
    parts = []
    for first in range(0, q.shape[2], QUERIES):
        few = slice(first, first + QUERIES)
        seen = places[few].unsqueeze(1) >= places if mask is None else mask[:, :, few]
        parts.append(checkpoint(_attend, q[:, :, few], keys, values, seen, use_reentrant=False))
    return torch.cat(parts, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ v
