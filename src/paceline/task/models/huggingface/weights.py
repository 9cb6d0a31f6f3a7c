"""Weights in Hugging Face's names and files: mapping, safetensors export and reading, checks against a config.json.

Our decoder's names are LlamaForCausalLM's without the prefix `model.`; the head has none in either. Experts' names
are in experts.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import ConfigError, StorageError
from paceline.spec.model_folder import folder_of
from paceline.spec.task import ModelSpec
from paceline.task.models.huggingface.experts import IN_MIXTRAL, IN_QWEN3, SplitExperts, apart, joined, moe_config
from paceline.task.models.huggingface.export import SHARD_BYTES, Renamed, write_folder
from paceline.task.models.huggingface.likeness import FAMILIES
from paceline.task.models.huggingface.loaded import experts_in_files, names_in_files
from paceline.task.models.huggingface.names import HEAD, PREFIX, hf_name
from paceline.task.models.huggingface.road import read_config, road_of
from paceline.task.models.huggingface.theirs import build_theirs, changed_config
from paceline.task.models.shape import DecoderConfig, MoEConfig
from paceline.task.models.sizes import base_of

# Qwen2 is Llama with biases of queries, keys and values; Qwen3 is Llama with norms of single heads.
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}


def to_hf_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our decoder's state under the names of LlamaForCausalLM, or MixtralForCausalLM, and in its shapes."""
    return {hf_name(name): joined(name, tensor) for name, tensor in state.items()}


def from_hf_state(state: Mapping[str, Tensor], tied: bool = False) -> dict[str, Tensor]:
    """Return a LlamaForCausalLM state under our decoder's names; a `tied` model has no weight for the head."""
    names = (name for name in state if not (tied and name == HEAD))
    return {name.removeprefix(PREFIX): apart(name, state[name]) for name in names}


def to_hf_config(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return the content of the config.json that LlamaForCausalLM reads, or Qwen2's, Qwen3's and Mixtral's of it."""
    rope: dict[str, object] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope = {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq,
        }  # fmt: skip
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": dtype,
        "hidden_size": config.hidden, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "intermediate_size": config.ffn,
        "vocab_size": config.vocab, "tie_word_embeddings": config.tied, "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_seq, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": None, "eos_token_id": None, "torch_dtype": dtype,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},  # transformers 5
        "rope_theta": config.rope_theta, "rope_scaling": None if config.rope_scaling is None else rope,  # 4
    }  # fmt: skip
    if isinstance(config, MoEConfig):
        return {**llama, **moe_config(config)}
    return {**llama, **(QWEN3 if config.qk_norm else QWEN2 if config.qkv_bias else {})}


def export_safetensors(
    state: Mapping[str, Tensor], config: DecoderConfig, folder: str | Path, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write weights and config.json for `AutoModelForCausalLM.from_pretrained(folder)`; return the folder.

    `state` has our names and full tensors, and may be lazy: no more than one file's tensors are held at a time. Above
    `shard_bytes` the weights go to several files and an index. Every file is complete or absent, and on the disk
    before it has its name. Raises StorageError where the folder cannot be written.
    """
    config_json = to_hf_config(config)  # says so where there is no such model
    return write_folder(our_state(state, config), config_json, folder, shard_bytes)


def our_state(state: Mapping[str, Tensor], config: DecoderConfig) -> Mapping[str, Tensor]:
    """Return a decoder's whole tensors under the names of Hugging Face's files; each is made when it is asked for."""
    if isinstance(config, MoEConfig):
        state = SplitExperts(state, config.experts, IN_QWEN3 if config.qk_norm else IN_MIXTRAL)
    return Renamed(state, {hf_name(name): name for name in state})


def their_state(state: Mapping[str, Tensor], model: ModelSpec) -> Mapping[str, Tensor]:
    """Return the whole tensors of a model of transformers under the names of its files, where experts may stand alone.

    Each is made when it is asked for.
    """
    import torch

    with torch.device("meta"):
        theirs = build_theirs(road_of(model.name), **model.arguments)
    stacked = next(
        (name for name in state if name.endswith(("mlp.experts.down_proj", "feed_forward.experts.down_proj"))), None
    )
    inside = experts_in_files(theirs, stacked) if stacked is not None else None
    if stacked is not None and inside:
        state = SplitExperts(state, state[stacked].shape[0], inside)
    return Renamed(state, {file: name for name, file in names_in_files(theirs, list(state)).items()})


def config_of_folder(model: ModelSpec, decoder: DecoderConfig | None) -> dict[str, object]:
    """Return the config.json of a model that came from a folder: the folder's own, with what the task has changed."""
    folder, base = folder_of(model.name), base_of(model.name)
    assert folder is not None
    config = read_config(folder)
    if decoder is None or base is None:
        return {**config, **changed_config(model.arguments)}
    before, after = to_hf_config(base), to_hf_config(decoder)
    return {**config, **{entry: value for entry, value in after.items() if before[entry] != value}}


def check_hf_config(config: DecoderConfig, folder: str | Path) -> None:
    """Raise ConfigError where a folder's config.json says that its weights belong to a different decoder.

    Shapes cannot tell everything: with another rotary base or norm epsilon the same weights compute other numbers.
    """
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        return
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StorageError(f"{path} cannot be read", str(error), "a fresh copy of the file") from error
    ours = to_hf_config(config)
    keys = [*([] if _alike(config, theirs) else ["model_type"]), "hidden_act", "num_attention_heads",
            "num_key_value_heads", "rms_norm_eps", "attention_bias",
            "mlp_bias", "tie_word_embeddings", "num_experts_per_tok", "norm_topk_prob"]  # fmt: skip
    pairs = {key: (ours.get(key), theirs[key]) for key in keys if theirs.get(key) is not None}
    their_rope = theirs.get("rope_parameters") or {
        "rope_theta": theirs.get("rope_theta", 10_000.0), **(theirs.get("rope_scaling") or {})
    }  # fmt: skip
    their_rope = {"rope_type": "default", "rope_theta": 10_000.0, **their_rope}
    pairs |= {key: (value, their_rope.get(key)) for key, value in ours["rope_parameters"].items()}
    wrong = [f"{key} is {there} there, {here} here" for key, (here, there) in pairs.items() if here != there]
    if wrong:
        raise ConfigError(
            f"the weights in {folder} belong to another model than {config.name}", f"config.json: {'; '.join(wrong)}",
            "the named size that was exported, with the same overrides",
        )  # fmt: skip


def _alike(config: DecoderConfig, theirs: Mapping[str, object]) -> bool:
    """Return whether a config.json is of a type that computes as the decoder does, whatever the type is called."""
    family = FAMILIES.get(str(theirs.get("model_type")))
    if family is None:
        return False
    routed = "num_experts_per_tok" in family.own
    return (family.qk_norm, family.qkv_bias, routed) == (config.qk_norm, config.qkv_bias, isinstance(config, MoEConfig))
