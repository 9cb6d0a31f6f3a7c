"""Named sizes of the built-in decoder families, and how a spec's overrides change them. Imports no torch.

Sizes from 1b up are the published shapes of Meta's Llama 3.1 and 3.2 (the config.json of each release on the Hugging
Face hub). The small ones take the data's vocabulary, so their names count parameters at `nominal_vocab`: 257 (bytes)
up to 30m, GPT-2's 50,257 for 124m and 350m. The decoders with experts have Mixtral's structure, DeepSeekMoE's with
shared experts, or Qwen3's; their published shapes are those of the releases named beside them.

A folder of Hugging Face whose model the built-in decoder computes is one more size (huggingface/road.py).
"""

from __future__ import annotations

import dataclasses

from paceline.errors import ConfigError, suggestion
from paceline.spec.import_paths import is_import_path
from paceline.spec.model_folder import folder_of, is_model_folder
from paceline.spec.task import ModelSpec
from paceline.task.models.huggingface.road import road_of
from paceline.task.models.shape import DecoderConfig, MoEConfig, RopeScaling


def _small(name: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> DecoderConfig:
    return DecoderConfig(name, hidden, layers, heads, kv_heads, hidden // heads, ffn)


def _llama3(
    name: str, hidden: int, layers: int, heads: int, ffn: int, *, tied: bool = False, rope_factor: float = 8.0
) -> DecoderConfig:
    scaling = RopeScaling(rope_factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq=8192)
    return DecoderConfig(
        name, hidden, layers, heads, kv_heads=8, head_dim=hidden // heads, ffn=ffn, vocab=128_256, tied=tied,
        rope_theta=500_000.0, max_seq=131_072, rope_scaling=scaling,
    )  # fmt: skip


def _mixtral(
    name: str, hidden: int, layers: int, heads: int, ffn: int, *, vocab: int, max_seq: int, balance_weight: float
) -> MoEConfig:
    return MoEConfig(
        name, hidden, layers, heads, kv_heads=8, head_dim=hidden // heads, ffn=ffn, vocab=vocab, tied=False,
        rope_theta=1e6, max_seq=max_seq, experts=8, top_k=2, expert_ffn=ffn, balance_weight=balance_weight,
    )  # fmt: skip


def _deepseek(name: str, hidden: int, layers: int, heads: int, ffn: int, expert_ffn: int) -> MoEConfig:
    return MoEConfig(
        name, hidden, layers, heads, heads, hidden // heads, ffn, vocab=102_400, tied=False, norm_eps=1e-6,
        max_seq=4096, experts=64, top_k=6, expert_ffn=expert_ffn, shared_ffn=2 * expert_ffn, dense_layers=1,
        renormalise=False, balance_weight=0.001,
    )  # fmt: skip


_SIZES: tuple[DecoderConfig, ...] = (
    _small("llama-1m", 128, 5, 4, 2, 384),
    _small("llama-3m", 256, 4, 4, 2, 704),
    _small("llama-11m", 384, 6, 6, 2, 1280),
    _small("llama-30m", 512, 10, 8, 4, 1408),
    _small("llama-124m", 768, 12, 12, 12, 2048),
    _small("llama-350m", 1024, 24, 16, 16, 2688),
    _llama3("llama-1b", 2048, 16, 32, 8192, tied=True, rope_factor=32.0),  # Llama-3.2-1B
    _llama3("llama-3b", 3072, 28, 24, 8192, tied=True, rope_factor=32.0),  # Llama-3.2-3B
    _llama3("llama-8b", 4096, 32, 32, 14336),  # Llama-3.1-8B
    _llama3("llama-70b", 8192, 80, 64, 28672),  # Llama-3.1-70B
    _llama3("llama-405b", 16384, 126, 128, 53248),  # Llama-3.1-405B
    MoEConfig("moe-2m", 128, 5, 4, 2, 32, ffn=96, experts=8, top_k=2, expert_ffn=96),
    _mixtral("mixtral-8x7b", 4096, 32, 32, 14336, vocab=32_000, max_seq=32_768, balance_weight=0.02),  # v0.1
    _mixtral("mixtral-8x22b", 6144, 56, 48, 16384, vocab=32_000, max_seq=65_536, balance_weight=0.001),  # v0.1
    _deepseek("deepseek-moe-16b", 2048, 28, 16, 10944, 1408),  # deepseek-moe-16b-base
    MoEConfig(
        "qwen3-30b-a3b",
        2048,
        48,
        32,
        4,
        128,
        ffn=6144,
        vocab=151_936,
        tied=False,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_seq=40_960,
        qk_norm=True,
        experts=128,
        top_k=8,
        expert_ffn=768,
        balance_weight=0.001,
    ),  # Qwen3-30B-A3B
)
NAMED_SIZES: dict[str, DecoderConfig] = {size.name: size for size in _SIZES}


def is_factory(name: str) -> bool:
    """Return whether `name` is that of a factory: an import path, or a folder whose own class is built."""
    return is_import_path(name) or (folder_of(name) is not None and road_of(name).decoder is None)


def nominal_vocab(size: DecoderConfig) -> int:
    """Return the vocabulary at which a named size's name counts its parameters."""
    return size.vocab or (50_257 if size.hidden >= 768 else 257)


def is_named(name: str) -> bool:
    """Return whether `name` names a built-in decoder: a size, or a folder whose model the decoder computes."""
    return name in NAMED_SIZES or (folder_of(name) is not None and road_of(name).decoder is not None)


def base_of(name: str) -> DecoderConfig | None:
    """Return the shape that a name stands for before it is changed, None where it names no built-in decoder."""
    return NAMED_SIZES.get(name) or (road_of(name).decoder if folder_of(name) is not None else None)


def check_name(name: str) -> None:
    """Raise ConfigError where a model's name is neither a size, nor an import path, nor that of a folder that is there.

    It imports nothing of an import path and reads nothing of the data: it can be asked before either is there.
    """
    if not is_factory(name) and base_of(name) is None:
        raise _unknown(name)


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"there is no model '{name}'",
        "it is no named size, no import path package.module:factory, and no folder's path, which has a slash",
        f"'./{name}', with a slash, for the folder" if is_model_folder(name) else suggestion(name, NAMED_SIZES),
    )  # fmt: skip


def resolve_decoder(spec: ModelSpec, data_vocab: int, seq_len: int) -> DecoderConfig:
    """Return the decoder that a spec asks for, for data of `data_vocab` token values in samples of `seq_len` tokens.

    Raises ConfigError for an unknown name, an impossible shape, a vocabulary smaller than the data's, or samples
    longer than a published size's positions.
    """
    named = base_of(spec.name)
    if named is None:
        raise _unknown(spec.name)
    if spec.arguments:
        raise ConfigError(
            f"model {spec.name} takes no arguments, given {', '.join(sorted(spec.arguments))}",
            "`arguments` are for a factory of your own", "the overrides hidden, layers, heads, kv_heads, ffn, vocab",
        )  # fmt: skip
    base = _with_experts(named, spec)
    hidden, heads = spec.hidden or base.hidden, spec.heads or base.heads
    kept = (hidden, heads) == (base.hidden, base.heads)  # a published size's heads may have a width of their own
    if hidden % heads and not kept:
        fitting = hidden // heads * heads or heads
        raise ConfigError(
            f"model {spec.name}: hidden = {hidden} with heads = {heads}",
            "the hidden width is shared evenly by the heads", f"hidden = {fitting}",
        )  # fmt: skip
    return dataclasses.replace(
        base,
        hidden=hidden,
        layers=spec.layers or base.layers,
        heads=heads,
        kv_heads=spec.kv_heads or base.kv_heads,
        head_dim=base.head_dim if kept else hidden // heads,
        ffn=base.ffn if isinstance(base, MoEConfig) else spec.ffn or base.ffn,
        vocab=_vocab(spec, base, data_vocab),
        tied=base.tied if spec.tied is None else spec.tied,
        max_seq=_max_seq(base, seq_len),
    )


def _with_experts(base: DecoderConfig, spec: ModelSpec) -> DecoderConfig:
    """Return the named size with the spec's overrides of what only mixtures of experts have.

    `ffn` then is the width of one expert; the widths of dense layers and shared experts follow in proportion.
    """
    names = ("experts", "top_k", "scoring", "balance", "balance_weight")
    given = {name: value for name in names if (value := getattr(spec, name)) not in (0, "", None)}
    if spec.balance_weight is not None:
        given["balance_weight"] = spec.balance_weight
    if not isinstance(base, MoEConfig):
        if given:
            raise ConfigError(
                f"model {spec.name} takes no {', '.join(given)}", "it has no experts",
                f"a size that has: {', '.join(size.name for size in _SIZES if isinstance(size, MoEConfig))}",
            )  # fmt: skip
        return base
    if spec.ffn:
        given["expert_ffn"] = spec.ffn
        given["shared_ffn"] = spec.ffn * (base.shared_ffn // base.expert_ffn)
        given["ffn"] = spec.ffn * max(1, round(base.ffn / base.expert_ffn))
    if spec.layers:
        given["dense_layers"] = min(base.dense_layers, spec.layers - 1)
    return dataclasses.replace(base, **given)


def _vocab(spec: ModelSpec, base: DecoderConfig, data_vocab: int) -> int:
    vocab = spec.vocab or base.vocab or data_vocab
    if vocab < max(data_vocab, 1):
        raise ConfigError(
            f"model {spec.name} has a vocabulary of {vocab:,}", f"the data's tokenizer has {data_vocab:,} values",
            f"model.vocab = {data_vocab}" if data_vocab else "model.vocab, or data with a tokenizer",
        )  # fmt: skip
    return vocab


def _max_seq(base: DecoderConfig, seq_len: int) -> int:
    if base.max_seq and seq_len > base.max_seq:
        raise ConfigError(
            f"samples of {seq_len:,} tokens", f"{base.name} has {base.max_seq:,} positions",
            f"data.seq_len = {base.max_seq}",
        )  # fmt: skip
    return base.max_seq or seq_len
