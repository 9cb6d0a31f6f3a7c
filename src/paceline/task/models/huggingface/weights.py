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

from paceline.durable import publish, sync_folder
from paceline.errors import ConfigError, StorageError
from paceline.task.models.huggingface.experts import SplitExperts, apart, joined, moe_config
from paceline.task.models.huggingface.files import INDEX
from paceline.task.models.huggingface.likeness import FAMILIES
from paceline.task.models.huggingface.names import HEAD, PREFIX, hf_name
from paceline.task.models.shape import DecoderConfig, MoEConfig

# Qwen2 is Llama with biases of queries, keys and values; Qwen3 is Llama with norms of single heads.
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
SHARD_BYTES = 5 * 10**9  # as in transformers' save_pretrained up to version 4


def to_hf_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our decoder's state under the names of LlamaForCausalLM, or MixtralForCausalLM, and in its shapes."""
    return {hf_name(name): joined(name, tensor) for name, tensor in state.items()}


def from_hf_state(state: Mapping[str, Tensor], tied: bool = False) -> dict[str, Tensor]:
    """Return a LlamaForCausalLM state under our decoder's names; a `tied` model has no weight for the head."""
    names = (name for name in state if not (tied and name == HEAD))
    return {name.removeprefix(PREFIX): apart(name, state[name]) for name in names}


def to_hf_config(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return the content of the config.json that LlamaForCausalLM reads, or Qwen2's, Qwen3's and Mixtral's of it."""
    rope: dict[str, Any] = {"rope_type": "default"}
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
    from safetensors.torch import save_file

    folder = Path(folder)
    config_json = to_hf_config(config)  # says so where there is no such model
    if isinstance(config, MoEConfig):
        state = SplitExperts(state, config)
    ours = {hf_name(name): name for name in state}
    sizes, dtypes = {}, set()
    for name in ours:
        tensor = state[ours[name]]
        sizes[name] = tensor.nbytes
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
    parts = _parts(sizes, shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        for file, names in parts.items():
            held = {name: state[ours[name]].detach().cpu().contiguous() for name in names}
            save_file(held, folder / (file + ".part"), metadata={"format": "pt"})
            publish(folder / (file + ".part"), folder / file)
        if len(parts) > 1:
            weight_map = {name: file for file, names in parts.items() for name in names}
            _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
        else:
            (folder / INDEX).unlink(missing_ok=True)  # of an earlier export, and would take precedence
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        _write_json(folder / "config.json", {**config_json, "dtype": dtype, "torch_dtype": dtype})
    except OSError as error:
        raise StorageError(f"cannot export weights to {folder}", str(error), "a folder with room to write") from error
    return folder


def _parts(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Return file name to tensor names, in order, each file at most `shard_bytes` unless one tensor is larger."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    publish(part, path)


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


def _alike(config: DecoderConfig, theirs: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a type that computes as the decoder does, whatever the type is called."""
    family = FAMILIES.get(str(theirs.get("model_type")))
    if family is None:
        return False
    routed = "num_experts_per_tok" in family.own
    return (family.qk_norm, family.qkv_bias, routed) == (config.qk_norm, config.qkv_bias, isinstance(config, MoEConfig))
