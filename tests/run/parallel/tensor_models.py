"""Modules of a user's own, with rules, and tiny Hugging Face models from their configs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests_shared import VOCAB
from torch import nn

from paceline.task.rules import Rules

HEADS, WIDTH, INNER = 4, 16, 27  # an odd inner width: ranks hold different parts of it


class Block(nn.Module):
    """Attention and feed-forward with biases, layer norms and dropout."""

    def __init__(self, dropout: float, inner_dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout, self.inner_dropout = nn.Dropout(dropout), nn.Dropout(inner_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next activation [rows, seq, width]."""
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.o(attended))
        return x + self.dropout(self.down(self.inner_dropout(F.gelu(self.up(self.norm2(x))))))


LAYERS = {
    "embed": "vocabulary",
    **dict.fromkeys(("layers.*.q", "layers.*.k", "layers.*.v", "layers.*.up"), "column"),
    **dict.fromkeys(("layers.*.o", "layers.*.down"), "row"),
}
NORMS = dict.fromkeys(("layers.*.norm1", "layers.*.norm2", "norm"), "sequence")


class Whole(nn.Module):
    """A language model whose activation between layers is whole on every rank, with dropout on it."""

    paceline_rules = Rules(tensor={**LAYERS, "head": "vocabulary"}, counts={"heads": HEADS})
    dropout, inner_dropout, tied = 0.2, 0.0, False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(Block(self.dropout, self.inner_dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        if self.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Tied(Whole):
    """The same with one weight for embedding and head."""

    tied = True


class WholeHead(Whole):
    """The same with a head that has no rule, so that its logits are whole."""

    paceline_rules = Rules(tensor=LAYERS, counts={"heads": HEADS})


class Sequence(Whole):
    """The same with a split sequence, so without dropout."""

    paceline_rules = Rules(tensor={**LAYERS, **NORMS, "head": "vocabulary"}, counts={"heads": HEADS})
    dropout = 0.0


class SequenceDropout(Sequence):
    """Dropout on a split sequence."""

    dropout = 0.1


class InnerDropout(Whole):
    """Dropout on split features too."""

    inner_dropout = 0.1


class HalfTied(Tied):
    """A tied head without a rule: refused."""

    paceline_rules = WholeHead.paceline_rules


class Forgotten(Sequence):
    """A norm without a rule where the sequence is split: refused."""

    paceline_rules = Rules(tensor={**LAYERS, "norm": "sequence", "head": "vocabulary"} | {"layers.*.norm1": "sequence"})


class Misfit(Sequence):
    """A style for a layer that it is not for: refused."""

    paceline_rules = Rules(tensor={**LAYERS, **NORMS, "norm": "row", "head": "vocabulary"})


def _hugging_face(kind: str, **changes: Any) -> nn.Module:
    import transformers

    settings: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **changes,
    }  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings))


def llama() -> nn.Module:
    """Return a tiny Llama."""
    return _hugging_face("Llama")


def llama_with_dropout() -> nn.Module:
    """Return a tiny Llama that drops attention weights, of heads that are spread."""
    return _hugging_face("Llama", attention_dropout=0.3)


def qwen2() -> nn.Module:
    """Return a tiny Qwen2: biases, and a tied head."""
    return _hugging_face("Qwen2", tie_word_embeddings=True)


def qwen3() -> nn.Module:
    """Return a tiny Qwen3: norms of single heads."""
    return _hugging_face("Qwen3", head_dim=8)


def mistral() -> nn.Module:
    """Return a tiny Mistral."""
    return _hugging_face("Mistral", head_dim=8)


def gemma2() -> nn.Module:
    """Return a tiny Gemma 2: its embedding scales, so it stays whole, and so does the tied head."""
    return _hugging_face("Gemma2", head_dim=8, tie_word_embeddings=True)


def phi3() -> nn.Module:
    """Return a tiny Phi-3: its fused layers are split, gathered and split again."""
    return _hugging_face("Phi3")


def deepseek_v2() -> nn.Module:
    """Return a tiny DeepSeek-V2, whose plan uses styles that are not known."""
    return _hugging_face(
        "DeepseekV2", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1,
    )  # fmt: skip
