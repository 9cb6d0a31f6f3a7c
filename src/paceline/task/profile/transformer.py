"""Profiles of published transformer families from their shape: GPT, Llama, MPT, BLOOM, BERT, T5, mixtures of experts.

They describe models as other frameworks run them on accelerators, with fused norms, activations and rotary positions,
whole logits, and attention that is either fused (Dao 2023, arXiv:2307.08691) or computes and keeps its scores. What
Paceline itself runs has profiles of its own (`profile_analytic`, `profile_moe`). Imports no torch.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1): with GELU, LayerNorm, dropout and unfused
attention a layer keeps their s b h (34 + 5 a s / h) bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from paceline.spec.profile import ROUTING_MOVES, BlockProfile, ModelProfile
from paceline.task.profile.aligned import unaligned_flops

MASK = 0.5  # a dropout mask of one byte, in elements of two
# Elements that one fused kernel reads and writes for each element of its output, in the forward pass.
NORM_MOVES, ROTARY_MOVES, GELU_MOVES, SWIGLU_MOVES, RESIDUAL_MOVES = 2, 2, 2, 3, 3
# GPT-2's activation in pieces, `0.5 x (1 + tanh(c (x + 0.044715 pow(x, 3))))`: eight operators read and write 18 values
# for each in the forward pass, and 28 in the backward pass, the sums of its three gradients among them. Kept besides
# what one kernel keeps are the tanh and both factors of the last product, and under autocast, where `pow` and all after
# it are in fp32 (torch's page of torch.amp has the list), 6 elements of 2 bytes in place of 3. Launched are 19 for 2.
PIECES_MOVES, PIECES_KEPT, PIECES_OPERATORS = (18 + 28) / 3, 6, 6
# What Llama's modules of Transformers start beyond twice what fused kernels are, in each of three passes. Counted by a
# dispatcher's mode, torch 2.13, Transformers 5.23, under autocast to bf16 with gradients that are added up: a layer of
# Llama starts 52 operators that write something in the forward pass and 100 in the backward pass, where two for each of
# 15 are 90 in three passes; a layer of Qwen3, whose queries and keys are normalised, 68 and 132, where 17 are 102.
# Without autocast, of weights that rest in 16 bits, Llama's starts 40 and 82, Qwen3's 56 and 116.
MODULE_OPERATORS, MODULE_NORM_OPERATORS, CAST_OPERATORS = 5, 6, 5
# Unfused attention reads and writes the scores: from the first product, scale, mask and softmax, into the second.
SCORE_MOVES, SCORE_DROPOUT_MOVES = 4, 2 + MASK
LOGIT_MOVES = 4.0  # in 2-byte elements: written, read as fp32 by the loss's two passes
ROUTING_OPERATORS = 16  # softmax, choice, sort, counts, gathers, weighted sum, and what the balance needs


@dataclass(frozen=True)
class ExpertSizes:
    """The mixture of experts of a family: in every `every`-th layer after the first `dense_layers`."""

    count: int
    top_k: int
    ffn: int  # width of one expert
    shared_ffn: int = 0  # width of the experts that every token passes
    dense_layers: int = 0
    every: int = 1
    groups: tuple[int, ...] = ()  # groups of experts, and to how many of them a token goes at most; (): no limit


@dataclass(frozen=True)
class Latent:
    """Attention over compressed keys and values (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1)."""

    q_rank: int
    kv_rank: int
    nope_dim: int  # of a head: without positions, with rotary positions, of the values
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a transformer, and what of its kernels matters for its price."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq_len: int
    gated: bool = False  # SwiGLU, three matrices, instead of two
    biases: bool = True
    layer_norm: bool = True  # two vectors per norm; RMSNorm has one
    positions: str = "learned"  # learned, rotary, alibi, none
    embedding_norm: bool = False
    tied: bool = True
    causal: bool = True
    dropout: bool = False
    flash: bool = True  # fused attention; else scores are computed whole, and kept
    # Part of its products' outputs that selective recompute keeps beside attention's; None: all but attention's core.
    selective_products: float | None = None
    selective_experts: bool = True  # whether those of routed experts are among them
    cross_attention_layers: int = 0  # of an encoder-decoder: the last so many layers also attend to the encoder
    experts: ExpertSizes | None = None
    latent: Latent | None = None
    window: int = 0  # tokens back that a causal layer attends to; 0: all
    full_every: int = 0  # of layers with a window, every so many-th attends to all; 0: none
    text_tokens: int = 0  # of a text, where a causal row has several and each token attends to its own; 0: one text
    head_norm: bool = False  # whether queries and keys are normalised
    gelu_in_pieces: bool = False  # whether GELU's tanh form is an operator after the other, trained under autocast
    norms_in_pieces: bool = False  # whether norms and rotary positions are, and weights are cast by autocast
    narrow_weights: bool = False  # whether those weights rest in 16 bits, so that none is cast

    def profile(self) -> ModelProfile:
        """Return the profile: embedding, layers, final norm, head with its loss."""
        return profile_transformer(self)


@lru_cache(maxsize=256)  # tables ask for the same few shapes thousands of times
def profile_transformer(shape: TransformerShape) -> ModelProfile:
    """Return the profile of a transformer of this shape, counts per sample of `seq_len` tokens."""
    kinds: dict[tuple[bool, bool, bool], BlockProfile] = {}
    layers = []
    for index in range(shape.layers):
        kind = (_is_routed(shape, index), _is_crossed(shape, index), _attends_to_all(shape, index))
        if kind not in kinds:
            kinds[kind] = _layer_of(shape if not kind[2] else replace(shape, window=0), *kind[:2])
        layers.append(replace(kinds[kind], name=f"layers.{index}"))
    return ModelProfile(
        name=shape.name,
        blocks=(_embedding(shape), *layers, _final_norm(shape), _head(shape)),
        tokens_per_sample=shape.seq_len,
        source="analytic",
    )


def _is_routed(shape: TransformerShape, index: int) -> bool:
    if shape.experts is None or index < shape.experts.dense_layers:
        return False
    return (index - shape.experts.dense_layers) % shape.experts.every == shape.experts.every - 1


def _layer_of(shape: TransformerShape, routed: bool, crossed: bool) -> BlockProfile:
    plain = _layer(shape)
    return _routed(shape, plain) if routed else _crossed(shape, plain) if crossed else plain


def _attends_to_all(shape: TransformerShape, index: int) -> bool:
    return not shape.window or bool(shape.full_every and index % shape.full_every == shape.full_every - 1)


def _is_crossed(shape: TransformerShape, index: int) -> bool:
    return index >= shape.layers - shape.cross_attention_layers


@dataclass(frozen=True)
class _Attention:
    """What a layer's attention has: products as (inner, outer) widths, and the widths of what it reads and gives."""

    products: tuple[tuple[int, int], ...]
    queries: int  # of the scores' product, over all heads
    keys: int
    values: int  # over the heads of keys and values
    output: int  # of attention, over all heads
    vectors: int  # parameters besides the products'
    normed: int = 0  # widths of what is normalised between the products
    kept: int = 0  # of what backward needs besides those


def _attention(shape: TransformerShape) -> _Attention:
    hidden, heads = shape.hidden, shape.heads
    if shape.latent is None:
        width, narrow = heads * shape.head_dim, shape.kv_heads * shape.head_dim
        plain = ((hidden, width), (hidden, narrow), (hidden, narrow), (width, hidden))
        biases = width + 2 * narrow + hidden if shape.biases else 0
        vectors = biases + (2 * shape.head_dim if shape.head_norm else 0)
        normed = (width + narrow) * shape.head_norm
        return _Attention(plain, width, narrow, narrow, width, vectors, normed, normed)
    latent = shape.latent
    query, value = heads * (latent.nope_dim + latent.rope_dim), heads * latent.value_dim
    expanded = heads * (latent.nope_dim + latent.value_dim)
    products = (
        (hidden, latent.q_rank), (latent.q_rank, query), (hidden, latent.kv_rank + latent.rope_dim),
        (latent.kv_rank, expanded), (value, hidden),
    )  # fmt: skip
    ranks = latent.q_rank + latent.kv_rank
    return _Attention(products, query, query, value, value, ranks, ranks, 2 * ranks + latent.rope_dim)


def linear_layers(shape: TransformerShape) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return the inner and outer widths of a layer's linear layers: attention's, and those of a dense feed-forward."""
    inward = ((shape.hidden, shape.ffn),) * (2 if shape.gated else 1)
    return _attention(shape).products, (*inward, (shape.ffn, shape.hidden))


def _norm_parameters(shape: TransformerShape) -> int:
    return shape.hidden * (2 if shape.layer_norm else 1)


def _layer(shape: TransformerShape) -> BlockProfile:
    """Return the profile of one layer of attention and feed-forward."""
    hidden, ffn, seq, heads = shape.hidden, shape.ffn, shape.seq_len, shape.heads
    attention = _attention(shape)
    matrices = 3 if shape.gated else 2
    products = [pair for part in linear_layers(shape) for pair in part]
    weights = sum(inner * outer for inner, outer in products)
    biases = (ffn * (matrices - 1) + hidden) if shape.biases else 0
    narrow = attention.keys + attention.values
    scores = 0.0 if shape.flash else float(heads * seq)  # per token
    mask = MASK if shape.dropout else 0.0
    # Two products of 2 x pairs x width each. Fused attention leaves out what the mask hides.
    pair_flops = 2.0 * seq * seq * (attention.queries + attention.output)
    shown = _shown_share(shape) if shape.causal and shape.flash else 1.0
    activation = (SWIGLU_MOVES if shape.gated else PIECES_MOVES if shape.gelu_in_pieces else GELU_MOVES) * ffn
    rotary = ROTARY_MOVES * (attention.queries + attention.keys) if shape.positions == "rotary" else 0
    score_moves = scores * (SCORE_MOVES + (SCORE_DROPOUT_MOVES if shape.dropout else 0))
    # Kept: the inputs of two norms and of what reads them, queries, keys, values, attention's output, and of the
    # activation its inputs and its result; masks of two dropouts.
    linear = 4 * hidden + attention.queries + narrow + attention.output + matrices * ffn + 2 * mask * hidden
    linear += attention.kept + PIECES_KEPT * ffn * shape.gelu_in_pieces
    # Kept under selective recompute: all but attention's core (Korthikanti, section 5), or the block's input and the
    # outputs of attention and of products.
    kept_attention = attention.output + 2 * heads
    selective = linear
    if shape.selective_products is not None:
        outputs = attention.queries + narrow + (matrices - 1) * ffn + 2 * hidden
        selective = hidden + kept_attention + shape.selective_products * outputs
    # Kept by unfused attention: the softmax's result and, with dropout, a mask and its result.
    kept_scores = scores * (1 + (1 + MASK if shape.dropout else 0))
    return BlockProfile(
        name="layers",
        kind="decoder" if shape.causal else "module",
        parameters=weights + biases + attention.vectors + 2 * _norm_parameters(shape),
        matmul_flops=2.0 * seq * weights,
        attention_flops=shown * pair_flops,
        moved_elements=float(
            seq * (NORM_MOVES * (2 * hidden + attention.normed) + rotary + activation)
            + seq * (2 * RESIDUAL_MOVES * hidden + score_moves)
        ),
        saved_elements=float(seq * (linear + kept_scores)),
        saved_fp32_elements=float(seq * (heads if shape.flash else 0)),  # log-sum-exp per head
        selective_elements=float(seq * selective),
        input_elements=float(seq * hidden),
        transient_elements=float(seq * (max(ffn, scores) + hidden)) / 2,  # gradients, in the compute dtype
        operators=len(products)
        + 2
        + 4
        + (2 if shape.flash else 5)
        + (2 if attention.normed else 0)
        + PIECES_OPERATORS * shape.gelu_in_pieces
        + (MODULE_OPERATORS + MODULE_NORM_OPERATORS * bool(attention.normed)) * shape.norms_in_pieces
        + CAST_OPERATORS * (shape.norms_in_pieces and not shape.narrow_weights),
        matmul_width=_width(products),
        recomputable=True,
        kv_elements=float(seq * narrow),
        largest_weight=max(inner * outer for inner, outer in products),
        fused_attention=shape.flash,
        heads=heads,
        kv_heads=shape.kv_heads,
        attention_out_elements=0.0 if shape.selective_products is None else float(seq * kept_attention),
        **unaligned_flops(products, seq),
        last_flops=0.0 if shape.dropout else 2.0 * seq * ffn * hidden,  # dropout keeps a mask of its result
    )


def _shown_share(shape: TransformerShape) -> float:
    """Return the part of all pairs of tokens that a causal mask shows: half, or w / s - (w / s)^2 / 2 with a window.

    Of a row of texts that are t tokens long it is t / s of what one text of t tokens shows.

    Example: of 4,096 tokens with a window of 128, 3.1 % instead of 50 %; of 16 texts of 256 tokens as much.
    """
    text = min(shape.text_tokens or shape.seq_len, shape.seq_len)
    part = min(1.0, shape.window / text) if shape.window else 1.0
    return (part - part**2 / 2) * text / shape.seq_len


def _routed(shape: TransformerShape, plain: BlockProfile) -> BlockProfile:
    """Return a layer whose feed-forward is a mixture of experts, evenly loaded (compare profile_moe)."""
    experts = shape.experts
    assert experts is not None
    active = _layer(replace(shape, ffn=experts.top_k * experts.ffn + experts.shared_ffn))
    hidden, seq, matrices = shape.hidden, shape.seq_len, 3 if shape.gated else 2
    rows = float(seq * experts.top_k * hidden)
    one = matrices * hidden * experts.ffn + (experts.ffn * (matrices - 1) + hidden if shape.biases else 0)
    dense_ffn = matrices * hidden * shape.ffn + (shape.ffn * (matrices - 1) + hidden if shape.biases else 0)
    shared = matrices * hidden * experts.shared_ffn
    beside = [*_attention(shape).products, (hidden, experts.count), *matrices * [(hidden, experts.shared_ffn)]]
    every_token = plain.parameters - dense_ffn + hidden * experts.count + shared
    selective = active.selective_elements + 2.0 * rows
    if shape.selective_products is not None and not shape.selective_experts:
        # Of outputs of products, those of routed experts are computed again: nothing that goes to them or comes back
        # stays. The router's logits do.
        routed = (matrices - 1) * experts.top_k * experts.ffn + (0 if experts.shared_ffn else hidden)
        selective = active.selective_elements + shape.selective_products * seq * (experts.count - routed)
    return replace(
        active,
        kind="experts",
        parameters=every_token + experts.count * one,
        matmul_flops=active.matmul_flops + 2.0 * seq * hidden * experts.count,
        moved_elements=active.moved_elements + ROUTING_MOVES * rows + 2.0 * seq * experts.count,
        saved_elements=active.saved_elements + 2.0 * rows,
        saved_fp32_elements=active.saved_fp32_elements + seq * experts.count,
        selective_elements=selective,
        transient_elements=active.transient_elements + rows,
        operators=active.operators + ROUTING_OPERATORS,
        matmul_width=_width([pair for pair in beside if min(pair)]),
        largest_weight=max(inner * outer for inner, outer in beside),
        experts=experts.count,
        expert_parameters=experts.count * one,
        active_parameters=every_token + experts.top_k * one,
        expert_widths=(hidden, experts.ffn),
        routed_elements=rows,
        routed_flops=2.0 * seq * experts.top_k * matrices * hidden * experts.ffn,
        routed_groups=experts.groups,
        last_flops=0.0,  # results are weighed
    )


def _crossed(shape: TransformerShape, plain: BlockProfile) -> BlockProfile:
    """Return a layer of a decoder that also attends to an encoder's output of the same length."""
    attention = _attention(shape)
    weights = sum(inner * outer for inner, outer in attention.products)
    seq, hidden, narrow = shape.seq_len, shape.hidden, attention.keys + attention.values
    scores = 0.0 if shape.flash else float(shape.heads * seq)
    more = seq * (2 * hidden + attention.queries + narrow + attention.output)
    return replace(
        plain,
        parameters=plain.parameters + weights + attention.vectors + _norm_parameters(shape),
        matmul_flops=plain.matmul_flops + 2.0 * seq * weights,
        attention_flops=plain.attention_flops + 2.0 * seq * seq * (attention.queries + attention.output),
        moved_elements=plain.moved_elements + seq * ((NORM_MOVES + RESIDUAL_MOVES) * hidden + SCORE_MOVES * scores),
        saved_elements=plain.saved_elements + more + seq * scores,
        selective_elements=plain.selective_elements + more,
        operators=plain.operators + len(attention.products) + 5,
    )


def _embedding(shape: TransformerShape) -> BlockProfile:
    seq, hidden = shape.seq_len, shape.hidden
    learned = seq * hidden if shape.positions == "learned" else 0
    norm = _norm_parameters(shape) if shape.embedding_norm else 0
    return _plain_block(
        name="embedding",
        kind="embedding",
        parameters=shape.vocab * hidden + learned + norm,
        moved_elements=float(seq * hidden * (2 + (2 if learned else 0) + (NORM_MOVES if norm else 0))),
        saved_elements=float(seq * hidden) if norm else 0.0,
        input_elements=0.0,
        transient_elements=seq * hidden / 2,
        operators=1 + (1 if learned else 0) + (1 if norm else 0),
    )


def _final_norm(shape: TransformerShape) -> BlockProfile:
    kept = float(shape.seq_len * shape.hidden)
    return _plain_block(
        name="norm",
        kind="norm",
        parameters=_norm_parameters(shape),
        moved_elements=NORM_MOVES * kept,
        saved_elements=kept,
        input_elements=kept,
        transient_elements=kept / 2,
        operators=1,
    )


def _head(shape: TransformerShape) -> BlockProfile:
    """Return the head and the loss, which keeps the logits in fp32 until the backward pass."""
    seq, hidden, vocab = shape.seq_len, shape.hidden, shape.vocab
    return replace(
        _plain_block(
            name="head",
            kind="head",
            parameters=0 if shape.tied else vocab * hidden,
            moved_elements=LOGIT_MOVES * seq * vocab,
            saved_elements=float(seq * hidden),
            input_elements=float(seq * hidden),
            transient_elements=float(seq * vocab),  # the exponentials, in fp32
            operators=6,
        ),
        matmul_flops=2.0 * seq * vocab * hidden,
        saved_fp32_elements=float(seq * vocab),
        matmul_width=_width([(hidden, vocab)]),
        **unaligned_flops([(hidden, vocab)], seq),
        tied_to="embedding" if shape.tied else "",
    )


def _plain_block(
    *,
    name: str,
    kind: str,
    parameters: int,
    moved_elements: float,
    saved_elements: float,
    input_elements: float,
    transient_elements: float,
    operators: int,
) -> BlockProfile:
    """Return a block without products that recompute leaves alone."""
    return BlockProfile(
        name=name,
        kind=kind,
        parameters=parameters,
        matmul_flops=0.0,
        attention_flops=0.0,
        moved_elements=moved_elements,
        saved_elements=saved_elements,
        saved_fp32_elements=0.0,
        selective_elements=saved_elements,
        input_elements=input_elements,
        transient_elements=transient_elements,
        operators=operators,
        matmul_width=1,
    )


def _width(products: list[tuple[int, int]]) -> int:
    """Return the geometric mean of the widths of products, weighed by their FLOPs."""
    total = sum(inner * outer for inner, outer in products)
    return round(math.exp(sum(inner * outer * math.log(inner * outer) / 2 for inner, outer in products) / total))
