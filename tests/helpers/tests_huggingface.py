"""Tiny decoders of transformers with random weights, and rows of text for them: padded on either side, or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from tests_shared import VOCAB, PaddedText, decoder_task
from torch import nn

from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"head_dim": 8, "sliding_window": None},
    "GPTNeoX": {"num_key_value_heads": None, "hidden_dropout": 0.1},
    "Granite": {"attention_multiplier": 0.7},
    "DeepseekV3": LATENT,
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "Gemma2": {"head_dim": 8, "sliding_window": 64},
    "Bert": {"is_decoder": False},
    "Falcon": {"new_decoder_architecture": False, "multi_query": True},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 4},
}  # fmt: skip


def causal(family: str, **changes: Any) -> nn.Module:
    """Return a small causal language model of a family."""
    config = getattr(transformers, f"{family}Config")
    shape = {**SHAPE, **FAMILIES[family], **changes}
    return transformers.AutoModelForCausalLM.from_config(config(**{k: v for k, v in shape.items() if v is not None}))


class Rows(PaddedText):
    """Rows of `seq` tokens with some labels masked; with a `side`, rows of unequal length and their attention_mask."""

    def __init__(self, seq: int, side: str = "") -> None:
        self.seq = self.items_per_sample = seq
        self.side = side

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return rows that depend on their ids alone."""
        rows = [np.random.default_rng(int(i)) for i in ids]
        walks = np.stack([np.cumsum(row.integers(0, 3, self.seq + 1)) % VOCAB for row in rows])
        tokens, labels = torch.from_numpy(walks[:, :-1].copy()), torch.from_numpy(walks[:, 1:].copy())
        real = torch.ones_like(tokens)
        for index, row in enumerate(rows):
            labels[index, : int(row.integers(0, self.seq // 2))] = -100
            missing = int(row.integers(1, self.seq // 2))
            padding = slice(0, missing) if self.side == "left" else slice(self.seq - missing, None)
            real[index, padding] = 0
        if not self.side:
            return {"tokens": tokens, "labels": labels}
        return {"tokens": tokens * real, "labels": labels.where(real > 0, -100), "attention_mask": real}


def hf_task(family: str, seq: int = 16, side: str = "", **changes: Any) -> Task:
    """Return a task that trains a family on such rows, with equal steps whatever rounding does to small gradients."""
    model: Callable[[], nn.Module] = functools.partial(causal, family, **changes)
    return decoder_task(
        model=model, data=Rows(seq, side), objective="next_token", optimizer=OptimizerSpec(lr=3e-3, eps=1e-4)
    )
