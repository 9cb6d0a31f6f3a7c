"""Models of Hugging Face for the table of proven layouts, small enough to be proven as they are."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

WIDTH, HEADS, KV_HEADS, LAYERS, POSITIONS = 48, 8, 4, 5, 24
VOCAB = 263  # bytes and an end-of-document mark fit in; a prime, so shards of the embedding are uneven


def from_config(kind: str, **changes: Any) -> nn.Module:
    """Return a small causal model of a family, from its config alone."""
    shape: dict[str, Any] = {
        "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": WIDTH // HEADS, "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**shape, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)
