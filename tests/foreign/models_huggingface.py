"""Families of Hugging Face, tiny and with random weights: a factory for each kind of head, and the objectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from foreign_data import CLASSES, SEQ_LEN, VOCAB
from torch import Tensor, nn

Summed = tuple[Tensor, Tensor]
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DECODER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 32, **NONE,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip

STATES: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_expand": 2,
}  # fmt: skip
HYBRID = ["linear_attention", "full_attention", "linear_attention"]

# Family -> what its config has beside, or in place of, the shape of a decoder.
CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"head_dim": 8},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 6},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 6},
    "Phi": {"num_key_value_heads": 4},
    "Phi3": {},
    "Olmo2": {},
    "Glm4": {"head_dim": 8},
    "Granite": {},
    "Starcoder2": {"sliding_window": None},
    "GPTNeoX": {},
    "Falcon": {"new_decoder_architecture": False, "multi_query": True, "num_key_value_heads": None},
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    "Bloom": {"n_layer": 3, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"head_dim": 8, **EXPERTS},
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 4},
}  # fmt: skip
# Families beside the table, held by test_odd_programs.py: state spaces, recurrences, and mixtures with attention.
MORE: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8, "expand": 2},
    "FalconMamba": {"state_size": 8, "expand": 2},
    "Rwkv": {"attention_hidden_size": 32, "rescale_every": 0},
    "Jamba": {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
              "mamba_d_state": 8, "mamba_dt_rank": 4},
    "RecurrentGemma": {"lru_width": 32, "attention_window_size": 6},
    "Bamba": {"attn_layer_indices": [1], **STATES},
    "FalconH1": {"mamba_d_ssm": 64, **STATES},
    "GraniteMoeHybrid": {"layer_types": HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 16, **STATES},
    "Zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 8, "mamba_d_state": 8,
               "chunk_size": 4, "adapter_rank": 4},
    "NemotronH": {"layers_block_type": ["linear_attention", "moe", "full_attention"], "head_dim": 8,
                  "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 4,
                  "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "moe_shared_expert_intermediate_size": 16},
    "Qwen3Next": {"layer_types": HYBRID, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                  "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 16,
                  **EXPERTS},
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "MiniMax": {"layer_types": HYBRID, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "block_size": 4},
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0},
}  # fmt: skip
# The same with random numbers: what is called -> (family, what draws).
DRAWING: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2 with dropout": ("GPT2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "OPT with dropout": ("OPT", {"dropout": 0.1, "attention_dropout": 0.1}),
    "OPT with layers left out": ("OPT", {"layerdrop": 0.3}),
    "Bloom with dropout": ("Bloom", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "Falcon with dropout": ("Falcon", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "GPTNeoX with dropout": ("GPTNeoX", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "Phi with dropout": ("Phi", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}),
    "Llama with dropout": ("Llama", {"attention_dropout": 0.1}),
    "Jamba with dropout": ("Jamba", {"attention_dropout": 0.1}),
    "Mixtral with noise": ("Mixtral", {"router_jitter_noise": 0.1}),
    "Phimoe with noise": ("Phimoe", {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1}),
}  # fmt: skip
STATES_ALONE = {"intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"}
UNLIKE = {  # families whose configs know nothing of some of a decoder's shape
    "GPT2": {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "max_position_embeddings"},
    "Bloom": {"intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "max_position_embeddings"},
    "OPT": {"intermediate_size", "num_key_value_heads"},
    "Mamba": STATES_ALONE,
    "Mamba2": STATES_ALONE,
    "FalconMamba": STATES_ALONE,
    "Rwkv": {"num_attention_heads", "num_key_value_heads"},
    "RecurrentGemma": {"max_position_embeddings"},
    "Zamba2": {"num_key_value_heads"},
    "NemotronH": {"num_hidden_layers"},
    "GPTNeoX": {"num_key_value_heads"},
    "Falcon": {"intermediate_size"},
}  # fmt: skip


def causal(family: str, **changes: Any) -> nn.Module:
    """Return a small causal language model of a family."""
    shape = {name: value for name, value in DECODER.items() if name not in UNLIKE.get(family, ())}
    config = getattr(transformers, f"{family}Config")(**{**shape, **{**CAUSAL, **MORE}[family], **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


def drawing(name: str) -> nn.Module:
    """Return a small causal language model that draws random numbers as it trains."""
    family, draws = DRAWING[name]
    return causal(family, **draws)


def t5(dropout: float = 0.0) -> nn.Module:
    """Return a small T5: an encoder and a decoder with tied embeddings."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=dropout,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def translated(model: nn.Module, batch: dict[str, Tensor]) -> Summed:
    """Return the cross-entropy of an encoder-decoder's next tokens, and their number."""
    logits = model(input_ids=batch["source"], decoder_input_ids=batch["target"], use_cache=False).logits
    return _counted(logits, batch["labels"])


def switch() -> nn.Module:
    """Return a small Switch: T5 with experts of a capacity, dropout and noise before its routers."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=SEQ_LEN, router_jitter_noise=0.1,
        dropout_rate=0.1, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.SwitchTransformersForConditionalGeneration(config)


def bert(dropout: float = 0.0) -> nn.Module:
    """Return a small BERT for masked tokens."""
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=SEQ_LEN, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def unmasked(model: nn.Module, batch: dict[str, Tensor]) -> Summed:
    """Return the cross-entropy of the hidden tokens, and their number; padding is not attended to."""
    return _counted(model(batch["tokens"], attention_mask=batch["mask"]).logits, batch["labels"])


def vit() -> nn.Module:
    """Return a small vision transformer."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def convnext() -> nn.Module:
    """Return a small ConvNeXt."""
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=2, image_size=16, num_labels=CLASSES
    )
    return transformers.ConvNextForImageClassification(config)


def clip() -> nn.Module:
    """Return a small CLIP: two towers and a temperature."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = {**size, "vocab_size": VOCAB, "max_position_embeddings": SEQ_LEN, "eos_token_id": VOCAB - 1}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**size, "image_size": 16, "patch_size": 4}, projection_dim=16
    )
    return transformers.CLIPModel(config)


def contrasted(model: nn.Module, batch: dict[str, Tensor]) -> Summed:
    """Return CLIP's contrastive loss of every image against all captions of the batch, and the number of rows."""
    similar = model(input_ids=batch["tokens"], pixel_values=batch["pixels"]).logits_per_image
    target = torch.arange(len(similar))
    loss = (F.cross_entropy(similar, target, reduction="sum") + F.cross_entropy(similar.T, target, reduction="sum")) / 2
    return loss, torch.tensor(len(similar))


def whisper() -> nn.Module:
    """Return a small Whisper: convolutions over sound, an encoder and a decoder."""
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=4, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, d_model=32, max_source_positions=16,
        max_target_positions=SEQ_LEN, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def transcribed(model: nn.Module, batch: dict[str, Tensor]) -> Summed:
    """Return the cross-entropy of the transcript's next tokens, and their number."""
    output = model(input_features=batch["sound"], decoder_input_ids=batch["target"], use_cache=False)
    return _counted(output.logits, batch["labels"])


def _counted(logits: Tensor, labels: Tensor) -> Summed:
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()
