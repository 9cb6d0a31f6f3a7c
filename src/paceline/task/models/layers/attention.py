"""Causal attention as a module of its own: the one place of a model where positions of a sequence meet.

A model whose attention runs through `CausalAttention` can share its sequences among ranks (the `cp` axis): all else in
a decoder works on each token by itself. It has no parameters, so it adds no name to a checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.task.models.layers.packed import PackedDocuments, PackedPart, as_mask, packed_attention

# (q, k, v, mask) of this rank's part of the sequence, and perhaps the scale -> the output for its queries
AttentionFunction = Callable[..., Tensor]

Mask = Tensor | PackedDocuments | PackedPart  # which keys a query sees


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v in which no query sees a later key; a key head may serve several query heads.

    `over_ranks` is set where ranks share a sequence: it is given this rank's part of queries, keys and values.
    """

    over_ranks: AttentionFunction | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        """Return [rows, heads, queries, head_dim] for q of that shape and k, v [rows, kv_heads, keys, head_dim].

        `mask` is bool, [rows, 1, queries, keys], True where a query sees a key, or says which documents are packed;
        None is plain causal attention.
        """
        if isinstance(mask, PackedDocuments):
            if (out := packed_attention(q, k, v, mask)) is not None:
                return out
            mask = as_mask(mask)
        if self.over_ranks is not None:
            return self.over_ranks(q, k, v, mask)
        assert not isinstance(mask, PackedPart), "a part of the queries, and no ranks that hold the other keys"
        return scaled_attention(q, k, v, mask)


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Return torch's attention: masked, or causal without a mask; scores times `scale`, or head_dim ** -0.5."""
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped, scale=scale
    )


def takes_positions(model: nn.Module) -> bool:
    """Return whether the model's forward pass can be told where its tokens stand: an argument `positions`."""
    return "positions" in inspect.signature(type(model).forward).parameters


def can_share_sequences(model: nn.Module) -> bool:
    """Return whether ranks can share this model's sequences: `positions` in forward, attention by CausalAttention."""
    return takes_positions(model) and any(isinstance(module, CausalAttention) for module in model.modules())
