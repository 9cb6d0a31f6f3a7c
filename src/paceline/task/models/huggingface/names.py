"""Which tensors a file of weights must hold for a model, by Hugging Face's names. Imports no torch.

Our decoder's names are LlamaForCausalLM's without the prefix `model.`; the head has none in either.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from paceline.errors import ConfigError
from paceline.task.models.huggingface.experts import Stored
from paceline.task.models.shape import DecoderConfig, MoEConfig

PREFIX = "model."
HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", HEAD)  # of the built-in decoder: a row for each token
COMPUTED = "rotary_emb.inv_freq"  # older files hold these frequencies, which follow from the config
BIAS = "mlp.gate.e_score_correction_bias"  # of a router's choice: zero where a file has none
SHOWN = 6  # names of one kind of difference that a message lists
FEW = 4  # parts that differ, up to which they may be drawn anew: more are another model

Shape = tuple[int, ...]


def hf_name(name: str) -> str:
    """Return the name that LlamaForCausalLM, or MixtralForCausalLM, has for a tensor of ours."""
    return name if name == HEAD else PREFIX + name


def decoder_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shape of every parameter of a built-in decoder, by Hugging Face's names."""
    hidden = config.hidden
    shapes: dict[str, Shape] = {"embed_tokens.weight": (config.vocab, hidden), "norm.weight": (hidden,)}
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer(config, index).items()}
    if not config.tied:
        shapes[HEAD] = (config.vocab, hidden)
    return {hf_name(name): shape for name, shape in shapes.items()}


def _layer(config: DecoderConfig, index: int) -> dict[str, Shape]:
    hidden, queries, keys = config.hidden, config.q_width, config.kv_width
    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    attention: dict[str, Shape] = {f"{name}.weight": (width, hidden) for name, width in widths.items()}
    attention["o_proj.weight"] = (hidden, queries)
    if config.qkv_bias:
        attention |= {f"{name}.bias": (width,) for name, width in widths.items()}
    if config.qk_norm:
        attention |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    routed = isinstance(config, MoEConfig) and index >= config.dense_layers
    mlp = _experts(config) if isinstance(config, MoEConfig) and routed else _feed_forward(hidden, config.ffn)
    return {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
        **{f"mlp.{name}": shape for name, shape in mlp.items()},
    }  # fmt: skip


def _feed_forward(hidden: int, width: int) -> dict[str, Shape]:
    return {"gate_proj.weight": (width, hidden), "up_proj.weight": (width, hidden), "down_proj.weight": (hidden, width)}


def _experts(config: MoEConfig) -> dict[str, Shape]:
    shared = _feed_forward(config.hidden, config.shared_ffn) if config.shared_ffn else {}
    return {
        "gate.weight": (config.experts, config.hidden),
        "experts.gate_up_proj": (config.experts, 2, config.expert_ffn, config.hidden),
        "experts.down_proj": (config.experts, config.hidden, config.expert_ffn),
        **{f"shared_experts.{name}": shape for name, shape in shared.items()},
    }


def check_shapes(
    wanted: Mapping[str, Shape], stored: Stored, aliases: Collection[str], path: str, fresh: Collection[str] = ()
) -> None:
    """Raise ConfigError where files lack tensors, hold others than wanted or of other shapes; all are told at once.

    `aliases` are names that files may hold besides, `fresh` the patterns that the task draws already.
    """
    missing = [name for name in wanted if name not in stored]
    unexpected = [name for name in stored if name not in wanted and name not in aliases]
    shapes = {
        name: f"{_text(stored.shape(name))} in the file, {_text(shape)} in the model"
        for name, shape in wanted.items()
        if name in stored and stored.shape(name) != shape
    }
    kinds = [(dict.fromkeys(missing, ""), "missing"), (dict.fromkeys(unexpected, ""), "unexpected"),
             (shapes, "of another shape")]  # fmt: skip
    because = "; ".join(f"{len(names)} {what}: {_alike(names)}" for names, what in kinds if names)
    if because:
        fix = f"the model that they were saved from{_drawn_instead([*missing, *unexpected, *shapes], fresh)}"
        raise ConfigError(f"the weights in {path} are not this model's", because, fix)


def _drawn_instead(names: Sequence[str], fresh: Collection[str]) -> str:
    """Return how a few parts that differ are drawn instead of read, such as a head or the rows of a vocabulary.

    The whole value of the option is said: with what is `fresh` already, and without parts of parts.
    """
    folders = dict.fromkeys(f"{name.rpartition('.')[0]}." for name in names)
    parts = [f"{own}*" for own in folders if not any(own != other and own.startswith(other) for other in folders)]
    if len(parts) > FEW or any(not part.strip(".*") or re.search(r"\.\d+\.", part) for part in parts):
        return ""
    listed = ", ".join(f'"{part}"' for part in dict.fromkeys([*fresh, *parts]))
    return f"; or, for another head or another vocabulary, task.model.fresh = [{listed}], which draws it anew"


def _text(shape: Shape) -> str:
    return str(list(shape))


def _alike(names: Mapping[str, str]) -> str:
    """Return names with what is said of each; those that differ in numbers alone stand together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, said in names.items():
        groups.setdefault((re.sub(r"\d+", "*", name), said), []).append(name)
    texts = []
    for (pattern, said), alike in groups.items():
        name = alike[0] if len(alike) == 1 else f"{pattern} ({len(alike)})"
        texts.append(f"{name} is {said}" if said else name)
    rest = f" and {len(texts) - SHOWN} more kinds" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + rest
