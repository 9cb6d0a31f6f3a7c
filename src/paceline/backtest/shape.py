"""The shape of the model that a table's row trained, from its columns; and what is known of public families by name."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from paceline.backtest.schema import StepRow
from paceline.backtest.words.adapters import has_adapters
from paceline.backtest.words.engine import has_engine_layers
from paceline.backtest.words.settings import is_unfused, modules_of
from paceline.backtest.words.texts import text_tokens
from paceline.plan.cost.constants import family_of
from paceline.plan.cost.programs.known import is_around_transformers, program_of, with_modules
from paceline.task.profile.transformer import ExpertSizes, Latent, TransformerShape

GPT2_VOCAB = 50_257
PADDED_TO = 128  # Megatron-LM pads a vocabulary to a multiple of this times tp

# What no column holds of public families, from their config.json on the Hugging Face hub: the width of a head where
# it is not hidden / heads, and the experts of DeepSeek's layers, whose `ffn_hidden` is that of the dense ones.
HEAD_DIMS = {"qwen3": 128, "gpt-oss": 64}
# Queries that share a head of keys, of families by name, from the same files: where a table states heads alone.
KV_HEADS = {"llama3": 8, "llama2-70b": 8, "mistral-7b": 8, "mixtral": 8, "gpt-oss": 8, "qwen3-30b": 4, "qwen3-235b": 4}
HEAD_NORMS = ("qwen3",)  # families whose queries and keys are normalised
# Tokens back that layers attend to, and of so many layers one that attends to all (`sliding_window`, `layer_types`).
WINDOWS = {"gpt-oss": (128, 2), "gemma2": (4096, 2), "gemma3": (1024, 6), "mistral-7b-v0.1": (4096, 0)}
# Families whose modules in Transformers have GPT-2's activation in pieces (`NewGELUActivation` of activations.py, read
# 2026-11-29, by the default `activation_function = "gelu_new"` of their configurations, from memory; GPT-NeoX has
# torch's GELU), and what notes say of it.
NEW_GELU = re.compile(r"^(?:distil)?gpt-?(?:2|j|neo(?!x))")
SAID_IN_PIECES, SAID_FUSED = re.compile(r"gelu_?new|new_?gelu"), re.compile(r"fused gelu")
# Weights of which no wider ones are kept; "weights in fp32, gradients in bf16" says that they are.
IN_16_BITS = re.compile(r"(?:^|; )weights\b(?:(?!32)[^;])*\bin (?:bf16|fp16|16 bits)\b")
OF_TRANSFORMERS = re.compile(r"\bof transformers\b")
# Chips that FlashAttention was never made for: it needs Turing at least (Dao-AILab/flash-attention, README.md). torch's
# own kernel runs on them, since 2023.
BEFORE_FLASH = ("V100", "P100")
# A sentence of a row's notes, and the model it speaks of.
WITHOUT_FLASH = re.compile(r"(?:(?:^|; )(\S+) |^|; )(?:without|no) flash[- ]?attention")
LATENT = Latent(1536, 512, 128, 64, 128)
DEEPSEEK = {
    "v2": (LATENT, ExpertSizes(160, 6, 1536, shared_ffn=3072, dense_layers=1, groups=(8, 3))),
    "v3": (LATENT, ExpertSizes(256, 8, 2048, shared_ffn=2048, dense_layers=3, groups=(8, 4))),
}
# Families by the names that tables have for their like.
FAMILIES = {
    "": ("",),
    "gpt": ("gpt", "gpt2", "gpt3", "opt", "bloom", "mpt", "dense"),
    "llama": ("llama", "llama2", "llama3", "mistral", "qwen2", "qwen3"),
    "moe": ("moe", "mixtral", "deepseek"),
    "bert": ("bert", "roberta", "encoder"),
    "t5": ("t5", "encoder-decoder"),
}


def shape_of(row: StepRow) -> tuple[TransformerShape | None, list[str]]:
    """Return the shape and what was assumed of it; None with the reason where the row does not give one."""
    family = next((name for name, alike in FAMILIES.items() if row.arch.lower() in alike), None)
    if family is None:
        return None, [f"arch {row.arch} has no profile here"]
    row = replace(row, arch=family)
    sizes = {name: getattr(row, name) for name in ("layers", "hidden", "heads")}
    missing = [name for name, value in sizes.items() if not value]
    if not row.layers or not row.hidden or (missing and missing != ["heads"]):
        return None, ["the model's shape is not stated"]
    if not row.seq_len:
        return None, ["the sequence length is not stated"]
    marks: list[str] = []
    heads = row.heads or _heads(row.hidden, marks)
    flags = _flags(row.notes)
    vocab = row.vocab or _vocab(row, marks)
    shape = TransformerShape(
        name=row.model,
        layers=row.layers,
        hidden=row.hidden,
        ffn=row.ffn_hidden or 4 * row.hidden,
        heads=heads,
        kv_heads=row.kv_heads or _kv_heads(row, heads, marks),
        head_dim=row.head_dim or _head_dim(row, row.hidden, heads),
        vocab=vocab,
        seq_len=row.seq_len,
    )
    shape = _with_family(shape, row, flags)
    shape = _with_kernels(shape, row, marks)
    shape = replace(shape, text_tokens=text_tokens(row, marks))
    if row.experts:
        shape = _with_experts(shape, row, flags, marks)
        if shape.experts is None:
            return None, ["experts without topk"]
    return _with_tying(shape, row, flags, marks), marks


def _heads(hidden: int, marks: list[str]) -> int:
    marks.append("heads of width 128 assumed")
    return max(1, hidden // 128)


def _kv_heads(row: StepRow, heads: int, marks: list[str]) -> int:
    """Return the heads of keys and values of a row that states none: of its family, else as many as queries have."""
    name = re.sub(r"[-_ ]", "-", row.model.lower()).replace("llama-", "llama")
    known = next((number for family, number in KV_HEADS.items() if name.startswith(family)), 0)
    if known and heads % known == 0:
        marks.append(f"{known} heads of keys and values, as {row.model} has")
        return known
    if row.arch in ("llama", "moe"):
        marks.append("as many heads of keys and values as of queries assumed")
    return heads


def _head_dim(row: StepRow, hidden: int, heads: int) -> int:
    known = next((width for name, width in HEAD_DIMS.items() if row.model.lower().startswith(name)), 0)
    return known or max(1, hidden // heads)


def _vocab(row: StepRow, marks: list[str]) -> int:
    """Return GPT-2's vocabulary as Megatron-LM pads it: what most tables of GPT shapes that state none used."""
    vocab = math.ceil(GPT2_VOCAB / (PADDED_TO * (row.tp or 1))) * PADDED_TO * (row.tp or 1)
    marks.append(f"vocabulary of {vocab:,} assumed (GPT-2's, padded)")
    return vocab


def _flags(notes: str) -> dict[str, str]:
    """Return the `name=value` pairs of a row's notes, as tables made from configurations carry them."""
    return dict(re.findall(r"(?:^|;)\s*([a-z][a-z0-9-]*)=([^;]*)", notes))


def _with_family(shape: TransformerShape, row: StepRow, flags: dict[str, str]) -> TransformerShape:
    name = row.model.lower()
    if row.arch in ("llama", "moe") and "moe-tiny" not in name:
        shape = replace(shape, gated=True, biases=False, layer_norm=False, positions="rotary", tied=False)
        if name.startswith(HEAD_NORMS):
            shape = replace(shape, head_norm=True)
    elif name.startswith("mpt"):
        shape = replace(shape, biases=False, positions="alibi")
    elif "bloom" in name:
        shape = replace(shape, positions="alibi", embedding_norm=True)
    elif row.arch in ("bert", "t5"):
        shape = replace(shape, causal=row.arch == "t5", cross_attention_layers=shape.layers if row.arch == "t5" else 0)
    window = next(
        (sizes for family, sizes in WINDOWS.items() if re.sub(r"gemma-", "gemma", name).startswith(family)), None
    )
    if window:
        shape = replace(shape, window=window[0], full_every=window[1])
    if "swiglu" in flags:
        shape = replace(shape, gated=True)
    if flags.get("normalization") == "RMSNorm":
        shape = replace(shape, layer_norm=False)
    if "position-embedding-type" in flags:
        shape = replace(shape, positions={"rope": "rotary"}.get(flags["position-embedding-type"], "learned"))
    return shape


def _with_kernels(shape: TransformerShape, row: StepRow, marks: list[str]) -> TransformerShape:
    """Return the shape with the attention that the row's software computed.

    Where a table does not say: as the program does unless it is asked, of which GPT shapes are the older ones. Chips
    since Hopper (2022) and queries that share keys (Ainslie et al. 2023, arXiv:2305.13245) are younger than
    FlashAttention (May 2022, arXiv:2205.14135), and came with programs that use it. Where scores are written, GPT's
    layers drop some of them, also those with experts: `--attention-dropout` of Megatron-LM is 0.1 unless it is given.
    Encoders of Transformers wrote their scores until 2024 and later, model by model (from memory: `EsmSelfAttention`;
    BERT has scaled_dot_product_attention since its version 4.41).
    """
    unfused = is_unfused(row.attention_kernel) or _noted_unfused(row)
    if not row.attention_kernel and not unfused:
        program, assumed = program_of(row.program, row.zero_stage)
        younger = (
            family_of(row.accelerator.upper().replace("_", "-")) in ("hopper", "blackwell")
            or shape.kv_heads < shape.heads
        )
        engine = has_engine_layers(row)  # layers of Transformer Engine, whose attention is fused
        guessed = assumed and not any(chip in row.accelerator.upper() for chip in BEFORE_FLASH)
        unfused = row.arch == "gpt" and not (program.fuses_attention or guessed or younger or engine)
        unfused |= row.arch == "bert" and is_around_transformers(row.program)
        marks.append(f"{'unfused' if unfused else 'fused'} attention assumed")
    program = with_modules(program_of(row.program, row.zero_stage)[0], modules_of(row.recompute))
    if not program.selective_is_attention:
        shape = replace(
            shape, selective_products=program.selective_products, selective_experts=program.selective_grouped
        )
    shape = replace(
        shape,
        gelu_in_pieces=_has_gelu_in_pieces(row),
        norms_in_pieces=_has_norms_in_pieces(row, shape),
        narrow_weights=IN_16_BITS.search(row.notes.lower()) is not None or has_adapters(row),
    )
    of_gpt = row.arch == "gpt" or (row.arch == "moe" and shape.positions == "learned" and not shape.gated)
    return replace(shape, flash=not unfused, dropout=unfused and of_gpt and program.drops_attention)


def _has_gelu_in_pieces(row: StepRow) -> bool:
    """Return whether a row's model computes GELU an operator after the other: as its notes say, else as its modules do.

    Example: GPT-2 by Transformers does, unless it was compiled, and an OPT or a GPT-NeoX by the same does not.
    """
    notes = row.notes.lower()
    if SAID_FUSED.search(notes) or row.compile:
        return False
    is_module = is_around_transformers(row.program) or OF_TRANSFORMERS.search(notes)
    named = row.arch == "gpt" and is_module and NEW_GELU.match(row.model.lower())
    return bool(named or SAID_IN_PIECES.search(notes))


def _has_norms_in_pieces(row: StepRow, shape: TransformerShape) -> bool:
    """Return whether a row's model is a Llama of Transformers that was not compiled: norms an operator after the other.

    DeepSpeed's own engine takes a module as it is, and who gives it a Llama is taken to have it from there.

    Example: a Qwen3 by Accelerate is, a GPT by the same has norms of torch.
    """
    is_llama = shape.gated and not shape.layer_norm and shape.positions == "rotary"
    is_module = is_around_transformers(row.program) or OF_TRANSFORMERS.search(row.notes.lower())
    by_engine = program_of(row.program, row.zero_stage)[0].takes_modules
    return bool(is_llama and not row.compile and (is_module or by_engine))


def _noted_unfused(row: StepRow) -> bool:
    """Return whether a row's notes say of its model, or of all, that it had no flash attention.

    Example: "126M without flash attention" says so of gpt-126M, and nothing of gpt-5B in the same table; "5B" is a word
    of gpt-5B, and none of gpt-1.5B or gpt-175B.
    """
    said = WITHOUT_FLASH.search(row.notes.lower())
    if said is None or not said[1]:
        return said is not None
    return re.search(rf"(?<![\d.]){re.escape(said[1])}(?![\w.])", row.model.lower()) is not None


def _with_experts(shape: TransformerShape, row: StepRow, flags: dict[str, str], marks: list[str]) -> TransformerShape:
    assert row.experts is not None
    if not row.topk:
        return shape
    version = re.search(r"deepseek-?(v\d)", row.model.lower())
    if version and version[1] in DEEPSEEK:
        latent, experts = DEEPSEEK[version[1]]
        dense = min(experts.dense_layers, shape.layers - 1)
        if "truncated" in row.model:
            dense = min(dense, 1)
            marks.append("one dense layer assumed in the truncated model")
        return replace(shape, latent=latent, experts=replace(experts, dense_layers=dense))
    if "multi-latent-attention" in flags:
        marks.append("latent attention priced as plain attention")
    return replace(shape, experts=ExpertSizes(row.experts, row.topk, shape.ffn))


def _with_tying(shape: TransformerShape, row: StepRow, flags: dict[str, str], marks: list[str]) -> TransformerShape:
    """Return the shape with its head tied or not, and positions learned or not, as the number of parameters says."""
    if "untie-embeddings-and-output-weights" in flags:
        return replace(shape, tied=False)
    if not row.n_params:
        return shape

    stated = row.n_params
    positions = ("learned", "alibi") if shape.positions in ("learned", "alibi") else (shape.positions,)
    candidates = [
        replace(shape, tied=tied, positions=kind) for tied in (shape.tied, not shape.tied) for kind in positions
    ]
    shape = min(candidates, key=lambda candidate: abs(candidate.profile().parameters - stated))
    parameters = shape.profile().parameters
    if abs(parameters / stated - 1) > 0.02:
        marks.append(f"{parameters / stated:.0%} of the parameters stated, by shape")
    return shape
