"""Tiny folders of Hugging Face with random weights, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 263  # holds the 257 values of bytes
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
# What each family has that a decoder with the defaults of another would compute otherwise.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "Qwen2": {"rms_norm_eps": 1e-2},
    "Qwen3": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "Mistral": {"head_dim": 8, "sliding_window": None},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Gemma": {"head_dim": 8},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
              "use_mamba_kernels": False},
    "Lfm2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1,
                "layer_types": ["conv", "full_attention"]},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {"pad_token_id": 0},
    "Olmo2": {},
    "Granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "SmolLM3": {"pad_token_id": 0},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0, "num_key_value_heads": None},
}  # fmt: skip


def write_model(folder: Path, family: str, shards: str = "5GB", **changes: Any) -> Path:
    """Write a folder of a family's tiny model, the same each time, and return it."""
    shape = {**SHAPE, **FAMILIES[family], **changes}
    config = getattr(transformers, f"{family}Config")(**{k: v for k, v in shape.items() if v is not None})
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # as they are drawn, norms are ones and biases zeros
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                known = ("weight", "bias", "proj", "A_log", "sinks")
                assert any(word in name for word in known) or name.endswith(".D")
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


def change_config(folder: Path, **changes: Any) -> Path:
    """Change entries of a folder's config.json; None takes one out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


def loaded(folder: Path) -> Any:
    """Return what from_pretrained makes of a folder, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json of whole words into a folder, with what lies beside one, and return the folder."""
    import tokenizers

    words = {word: index for index, word in enumerate(["<|endoftext|>", "[UNK]", "plus", "is", *map(str, range(200))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
