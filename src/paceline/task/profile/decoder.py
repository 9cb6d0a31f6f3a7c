"""The profile of the built-in decoder, from its shape alone. Imports no torch.

Activation bytes follow the method of Korthikanti et al. 2022 (arXiv:2205.05198, section 4): list what each operator
keeps for its backward pass. The terms differ from their equation 1 because the model does: RMSNorm keeps its input and
one number per token, SwiGLU has three products, keys and values are narrower, there are no dropout masks, and fused
attention keeps its output and one number per head instead of the weights (Dao 2023, arXiv:2307.08691).

Operators and moved elements are those of the bf16 forward pass on a CPU, where a norm is a chain of nine; fused
kernels launch and move less.
"""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.spec.profile import BlockProfile, ModelProfile, TensorLimits
from paceline.task.models.layers.chunks import loss_chunk_tokens
from paceline.task.models.shape import DecoderConfig
from paceline.task.profile.aligned import unaligned_flops
from paceline.task.profile.closed import closed_axes

NORM_MOVES = 7  # per element: 1 for the mean square, 2 to scale it, 2 to weigh it, 2 to round it
NORM_ROW_MOVES = 10  # per token: the mean square is scaled, shifted and inverted on its own
NORM_OPERATORS = 9
ROTARY_MOVES = 7  # per element of queries and keys: 2 for x * cos, 2 to swap halves, 3 to add the swapped times sin
ROTARY_OPERATORS = 3
ROTARY_TABLE_OPERATORS = 15


def profile_decoder(config: DecoderConfig, seq_len: int) -> ModelProfile:
    """Return the profile of a decoder on samples of `seq_len` tokens: embedding, layers, norm, head."""
    layer = decoder_layer(config, seq_len)
    layers = [replace(layer, name=f"layers.{index}") for index in range(config.layers)]
    return ModelProfile(
        name=config.name,
        blocks=(_embedding(config, seq_len), *layers, _norm(config, seq_len), _head(config, seq_len)),
        tokens_per_sample=seq_len,
        source="analytic",
        closed_axes=closed_axes("tp", "cp", "pp"),
        tensor_limits=TensorLimits(
            counts={"heads": config.heads, "kv_heads": config.kv_heads},
            splits=(config.vocab, config.kv_width, config.ffn),
            widths=(config.hidden,),
            splits_sequence=True,
        ),
    )


def _embedding(config: DecoderConfig, seq: int) -> BlockProfile:
    return BlockProfile(
        name="embed_tokens",
        kind="embedding",
        parameters=config.vocab * config.hidden,
        matmul_flops=0.0,
        attention_flops=0.0,
        moved_elements=2.0 * seq * config.hidden,
        saved_elements=0.0,  # only the tokens, which the batch holds anyway
        saved_fp32_elements=0.0,
        selective_elements=0.0,
        input_elements=0.0,
        transient_elements=float(seq * config.hidden),
        operators=1 + ROTARY_TABLE_OPERATORS,
        matmul_width=1,
    )


def decoder_layer(config: DecoderConfig, seq: int) -> BlockProfile:
    """Return the profile of one layer of attention and feed-forward."""
    hidden, ffn, queries, keys = config.hidden, config.ffn, config.q_width, config.kv_width
    products = [
        (hidden, queries),
        (hidden, keys),
        (hidden, keys),
        (queries, hidden),
        *2 * [(hidden, ffn)],
        (ffn, hidden),
    ]
    normed = (queries + keys) * config.qk_norm  # queries and keys that are normalised by head
    weights = sum(inner * outer for inner, outer in products)
    # Kept: the inputs of two norms, of four products that read them, of attention and its output, and in SwiGLU
    # gate, silu(gate), up and their product.
    saved = 4 * hidden + 2 * queries + 2 * keys + 4 * ffn + normed
    # Kept: the block's input and the outputs of seven products and of attention (log-sum-exp per head in fp32).
    selective = 3 * hidden + 2 * queries + 2 * keys + 2 * ffn + 2 * config.heads
    return BlockProfile(
        name="layers",
        kind="decoder",
        parameters=config.layer_parameters,
        matmul_flops=2.0 * seq * weights,
        attention_flops=2.0 * seq * seq * queries,  # two products of 2 seq^2 queries each, the causal half of them
        moved_elements=float(
            seq * (2 * _norm_moves(hidden) + NORM_MOVES * normed + ROTARY_MOVES * (queries + keys))
            + seq * (5 * ffn + 2 * 3 * hidden)
        ),
        saved_elements=float(seq * saved),
        saved_fp32_elements=float(seq * (2 + config.heads)),  # per token: two norms' scales, log-sum-exp per head
        selective_elements=float(seq * selective),
        input_elements=float(seq * hidden),
        # Backward of SwiGLU: gradients of the product, of silu(gate) and of up, and one of the stream.
        transient_elements=float(seq * (3 * ffn + hidden)),
        operators=(2 + 2 * config.qk_norm) * NORM_OPERATORS + 2 * ROTARY_OPERATORS + len(products) + 5,
        matmul_width=width_of(products),
        recomputable=True,
        kv_elements=2.0 * seq * keys,
        heads=config.heads,
        kv_heads=config.kv_heads,
        attention_out_elements=float(seq * (queries + 2 * config.heads)),
        **unaligned_flops(products, seq),
        last_flops=2.0 * seq * ffn * hidden,  # its result is added to the stream, and no gradient needs it
    )


def _norm(config: DecoderConfig, seq: int) -> BlockProfile:
    return BlockProfile(
        name="norm",
        kind="norm",
        parameters=config.hidden,
        matmul_flops=0.0,
        attention_flops=0.0,
        moved_elements=float(seq * _norm_moves(config.hidden)),
        saved_elements=float(seq * config.hidden),
        saved_fp32_elements=float(seq),
        selective_elements=float(seq * config.hidden),
        input_elements=float(seq * config.hidden),
        transient_elements=4.0 * seq * config.hidden,
        operators=NORM_OPERATORS,
        matmul_width=1,
    )


def _head(config: DecoderConfig, seq: int) -> BlockProfile:
    """Head and loss: gradients are taken in the forward pass, chunk by chunk, so no logits wait for the backward pass.

    What it moves is a third of what both passes move together, so that the usual factor of three is right.

    A chunk has logits in the compute dtype and in fp32, which exponentials and gradients are written over: 6 B an
    element, as a profiler of the allocator counts them (4 where both are one). When the backward pass begins, the
    head's gradient stands twice, as it was summed and in 16 bits: 6 B an element, 4 of them fixed.
    """
    hidden, vocab = config.hidden, config.vocab
    chunk = loss_chunk_tokens(vocab)
    scaled, chunks = 0.5 * vocab * hidden, 1.5 * chunk * vocab
    return BlockProfile(
        name="lm_head",
        kind="head",
        parameters=0 if config.tied else vocab * hidden,
        matmul_flops=2.0 * seq * vocab * hidden,
        attention_flops=0.0,
        moved_elements=4.0 * seq * vocab,
        saved_elements=float(seq * hidden),  # the gradient of its input
        saved_fp32_elements=0.0,
        selective_elements=float(seq * hidden),
        input_elements=float(seq * hidden),
        transient_elements=max(min(1.5 * seq * vocab, chunks), scaled),
        operators=14 * -(-seq // chunk) + 6,
        matmul_width=width_of([(hidden, vocab)]),
        **unaligned_flops([(hidden, vocab)], seq),
        tied_to="embed_tokens" if config.tied else "",
        transient_cap_elements=max(chunks, scaled),
        fixed_elements=float(vocab * hidden),  # the gradient of its weight, summed over chunks in fp32
    )


def _norm_moves(hidden: int) -> int:
    return NORM_MOVES * hidden + NORM_ROW_MOVES


def width_of(products: list[tuple[int, int]]) -> int:
    """Return the geometric mean of the widths of products, weighed by their FLOPs."""
    total = sum(inner * outer for inner, outer in products)
    log_mean = sum(inner * outer * math.log(inner * outer) / 2 for inner, outer in products) / total
    return round(math.exp(log_mean))
