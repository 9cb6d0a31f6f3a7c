"""Models whose layers a plain cut would get wrong: fused matrices, subclasses of nn.Linear, parametrised weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from tensor_models import _hugging_face
from tests_shared import VOCAB
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from paceline.task.rules import Rules

HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 4, 2, 4, 16, 26
LOCAL: dict[str, Any] = {"embed": "vocabulary", "out": "row", "down": "row", "head": "vocabulary"}
COUNTS = {"heads": HEADS, "kv_heads": KV_HEADS}


class Fused(nn.Module):
    """Grouped-query attention and a gated feed-forward, each from one matrix; sizes follow from the output."""

    paceline_rules = Rules(
        tensor={**LOCAL, "qkv": "fused", "gate_up": "fused"},
        parts={"qkv": (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), "gate_up": (INNER, INNER)},
        counts=COUNTS,
    )

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        kv = heads.shape[1] // 4
        q, k, v = heads[:, : 2 * kv], heads[:, 2 * kv : 3 * kv], heads[:, 3 * kv :]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.head(x + self.down(F.silu(gate) * up))


class CutGates(Fused):
    """`column` on the gates: one rank would get all of them."""

    paceline_rules = dataclasses.replace(
        Fused.paceline_rules, tensor={**Fused.paceline_rules.tensor, "gate_up": "column"}
    )


class OddGates(CutGates):
    """The same of a width that leaves ranks different numbers of features: the shapes no longer fit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER - 2, bias=False), nn.Linear(INNER - 1, WIDTH)


class CutQueries(Fused):
    """`column` on queries, keys and values."""

    paceline_rules = dataclasses.replace(Fused.paceline_rules, tensor={**Fused.paceline_rules.tensor, "qkv": "column"})


class Plain(nn.Linear):
    """A subclass with nn.Linear's own forward pass."""


class Scaled(nn.Linear):
    """A subclass that does more than the product."""

    def forward(self, x: Tensor) -> Tensor:
        """Return twice the product."""
        return 2 * super().forward(x)


class Pair(nn.Module):
    """A feed-forward of two layers of a class."""

    paceline_rules = Rules(tensor={"up": "column", "down": "row"})
    kind: type[nn.Linear] = Plain

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.up, self.down = self.kind(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


class ScaledPair(Pair):
    """With a subclass whose forward pass is another."""

    kind = Scaled


class NormedPair(Pair):
    """With a weight that is computed from two others."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.up)


class PatchedPair(Pair):
    """With a forward pass put on one instance."""

    def __init__(self) -> None:
        super().__init__()
        up = self.up
        up.forward = lambda x: 2 * F.linear(x, up.weight, up.bias)  # type: ignore[method-assign]


def olmo2() -> nn.Module:
    """Return a tiny OLMo-2, whose norms see all heads: its plan gathers queries and keys and splits them again."""
    return _hugging_face("Olmo2")


def llama_with_norms() -> nn.Module:
    """Return a tiny Llama whose own plan gets one rule more, and another in place of one of its own."""
    model = _hugging_face("Llama")
    model.paceline_rules = Rules(tensor={"model.norm": "replicated", "lm_head": "replicated"}, add_to_plan=True)
    return model


def adds_to_nothing() -> nn.Module:
    """Return a model that ships no plan, with rules that add to one."""
    model = Pair()
    model.paceline_rules = Rules(tensor={"up": "column", "down": "row"}, add_to_plan=True)
    return model
