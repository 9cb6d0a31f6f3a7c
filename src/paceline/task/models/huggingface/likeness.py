"""A config.json held against the built-in decoder, entry by entry. Imports no torch.

Defaults of entries that a file leaves out are those of transformers' classes (configuration_llama.py and its like,
releases 4.40 to 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.task.models.shape import DecoderConfig, MoEConfig, RopeScaling


@dataclass(frozen=True)
class Likeness:
    """What a config.json is to the built-in decoder: one that computes the same, or what is different."""

    family: str
    decoder: DecoderConfig | None
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """A model type of transformers that the built-in decoder may compute."""

    architecture: str
    own: Mapping[str, Any]  # entries of this type alone: what they must be, or MATTERS where the shape takes them
    kv_heads: int  # where the file does not say; 0: as many as heads
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


class _Any:
    """Any value is computed alike: the entry is read for the shape, or has no part in training."""


MATTERS = _Any()
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
         "max_position_embeddings")  # fmt: skip
COMMON: dict[str, object] = {
    **dict.fromkeys((*SHAPE, "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_theta",
                     "rope_scaling", "rope_parameters", "architectures", "model_type"), MATTERS),
    # of files and of generation
    **dict.fromkeys(("dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache", "bos_token_id",
                     "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "_attn_implementation",
                     "attn_implementation", "_attn_implementation_autoset", "return_dict", "id2label", "label2id",
                     "problem_type", "task_specific_params", "is_decoder", "max_window_layers", "unsloth_version",
                     "unsloth_fixed"), MATTERS),
    "hidden_act": "silu", "attention_dropout": 0.0, "sliding_window": None, "use_sliding_window": False,
    "partial_rotary_factor": 1.0, "output_attentions": False, "output_hidden_states": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": MATTERS, "router_aux_loss_coef": MATTERS, "output_router_logits": False,
           "num_local_experts": MATTERS}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}, 0),
    "mistral": Family("MistralForCausalLM", {}, 8),
    "qwen2": Family("Qwen2ForCausalLM", {}, 32, qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", {"attention_bias": False}, 32, qk_norm=True),
    "mixtral": Family("MixtralForCausalLM", {**EXPERTS, "router_jitter_noise": 0.0}, 8, rope_theta=1e6, norm_eps=1e-5),
    "qwen3_moe": Family("Qwen3MoeForCausalLM",
                        {**EXPERTS, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
                         "moe_intermediate_size": MATTERS, "norm_topk_prob": MATTERS, "num_experts": MATTERS},
                        4, qk_norm=True),
}  # fmt: skip
# What those compute otherwise that look alike.
GEMMA = ("its embeddings are scaled by the root of hidden_size", "its feed-forward has GELU")
UNLIKE: dict[str, tuple[str, ...]] = {
    "gemma": ("its norms multiply by 1 + weight", *GEMMA),
    "gemma2": ("its norms multiply by 1 + weight, and stand after each part too", *GEMMA,
               "attention scores and logits are capped (softcapping)", "every other layer attends to a window"),
    "gemma3_text": ("its norms multiply by 1 + weight, and stand after each part too", *GEMMA,
                    "queries and keys are normalised by such norms", "layers have rotary positions of two kinds"),
}  # fmt: skip


def likeness_of(config: Mapping[str, object], name: str) -> Likeness:
    """Return what a config.json is to the built-in decoder, all differences at once; `name` is the model's."""
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind)
    if family is None:
        known = UNLIKE.get(kind, (f"model_type '{kind}' is none of {', '.join(FAMILIES)}",))
        return Likeness(kind, None, known)
    differences = [*_of_class(config, family), *_of_entries(config, family), *_of_rope(config)]
    if differences:
        return Likeness(kind, None, tuple(differences))
    try:
        return Likeness(kind, _decoder(config, family, name), ())
    except ConfigError as error:  # a shape that the built-in decoder cannot have
        return Likeness(kind, None, (f"{error.what}: {error.because}",))


def _of_class(config: Mapping[str, Any], family: Family) -> list[str]:
    named = (config.get("architectures") or [""])[0]
    other = [f"its class is {named}, not {family.architecture}"] if named != family.architecture else []
    missing = [entry for entry in SHAPE if not _is_count(config.get(entry))]
    return other + ([f"config.json gives no count for {', '.join(missing)}"] if missing else [])


def _of_entries(config: Mapping[str, Any], family: Family) -> list[str]:
    """Return the entries that the built-in decoder does not know, or computes otherwise."""
    wanted = {**COMMON, **family.own}
    found = []
    for entry, value in config.items():
        if entry == "layer_types":
            kinds = sorted({str(each) for each in value or ()} - {"full_attention"})
            found += [f"layers of the kind {', '.join(kinds)}"] if kinds else []
        elif entry not in wanted:
            found += [f"{entry} = {value!r} is not known to it"] if value is not None and value is not False else []
        elif wanted[entry] is not MATTERS and not _same(value, wanted[entry]) and not _no_window(entry, config):
            found.append(f"{entry} = {value!r}, where it has {wanted[entry]!r}")
    return found


def _same(value: object, wanted: object) -> bool:
    return value == wanted or (value is None and not wanted)


def _no_window(entry: str, config: Mapping[str, Any]) -> bool:
    """Return whether a window of attention is none: it is switched off, or no shorter than any sequence."""
    if entry != "sliding_window":
        return False
    if str(config.get("model_type", "")).startswith("qwen") and not config.get("use_sliding_window", False):
        return True
    return bool(config["sliding_window"] >= (config.get("max_position_embeddings") or 0))


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary entries of either generation of files as one table."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    return rope


LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _of_rope(config: Mapping[str, object]) -> list[str]:
    rope = _rope(config)
    kind = rope["rope_type"]
    if kind not in ("default", "llama3"):
        return [f"rotary positions of the kind '{kind}'"]
    wanted = LLAMA3 if kind == "llama3" else ()
    missing = [entry for entry in wanted if not isinstance(rope.get(entry), int | float)]
    alike = {"rope_type": kind, "partial_rotary_factor": 1.0}
    unread = LLAMA3 if kind == "default" else ()  # of positions that are not scaled
    unknown = [
        f"rotary positions with {entry} = {value!r}"
        for entry, value in rope.items()
        if value is not None and entry not in (*wanted, *unread, "rope_theta") and alike.get(entry) != value
    ]
    return unknown + ([f"rotary positions of the kind 'llama3' without {', '.join(missing)}"] if missing else [])


def _decoder(config: Mapping[str, Any], family: Family, name: str) -> DecoderConfig:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope = _rope(config)
    scaling = None
    if rope["rope_type"] == "llama3":
        factor, low, high = (float(rope[entry]) for entry in LLAMA3[:3])
        scaling = RopeScaling(factor, low, high, int(rope[LLAMA3[3]]))
    shape: dict[str, object] = {
        "name": name, "hidden": hidden, "layers": config["num_hidden_layers"], "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or family.kv_heads or heads,
        "head_dim": config.get("head_dim") or hidden // heads, "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"], "tied": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": float(rope.get("rope_theta", family.rope_theta)),
        "norm_eps": float(config.get("rms_norm_eps", family.norm_eps)), "max_seq": config["max_position_embeddings"],
        "rope_scaling": scaling, "qk_norm": family.qk_norm, "qkv_bias": family.qkv_bias,
    }  # fmt: skip
    build: Callable[..., DecoderConfig] = DecoderConfig
    if "num_experts_per_tok" in family.own:
        build = MoEConfig
        shape |= _experts(config)
    return build(**shape)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what only a mixture of experts has: Mixtral's entries, or Qwen3's."""
    weight = float(config.get("router_aux_loss_coef", 0.001))
    return {
        "experts": config.get("num_experts") or config.get("num_local_experts") or 0,
        "top_k": config.get("num_experts_per_tok", 2),
        "expert_ffn": config.get("moe_intermediate_size") or config["intermediate_size"],
        "renormalise": bool(config.get("norm_topk_prob", config["model_type"] == "mixtral")),
        "balance": "sequence" if weight else "none", "balance_weight": weight,
    }  # fmt: skip


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
