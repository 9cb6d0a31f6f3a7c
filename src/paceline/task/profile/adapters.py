"""What adapters beside frozen linear layers compute, keep and hold; published transformers with them. Without torch.

A frozen weight has no gradient and no optimizer state, and its layer one product less in the backward pass (Hu et al.
2021, arXiv:2106.09685). What Paceline itself trains has its profile from the model (task/profile/adapted.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache

from paceline.spec.adapt.adapter import NF4, AdapterSpec
from paceline.spec.profile import BlockProfile, ModelProfile
from paceline.task.profile.aligned import unaligned_flops
from paceline.task.profile.transformer import TransformerShape, linear_layers

# What frozen layers of Transformers' Llama do not start, of what they count for each of three passes when kernels are
# separate: seven products of weights' gradients, nine sums of gradients, and what the weights of norms need, 20 in all.
# Counted as task/profile/transformer.py says; an adapter starts 4 operators forward and 8 backward, on top.
FROZEN_OPERATORS = 3
Pairs = Sequence[tuple[int, int]]  # widths of the inputs and outputs of linear layers


def with_adapters(block: BlockProfile, spec: AdapterSpec, shapes: Pairs, tokens: int) -> BlockProfile:
    """Return a block with what the adapters beside its layers compute, keep and hold, for `tokens` of a sample."""
    thin = sum(into + out for into, out in shapes)
    wide = sum(out for _, out in shapes)
    flops = 2.0 * tokens * spec.rank * thin
    products = [(block.matmul_flops, math.log(block.matmul_width))]
    products += [(2.0 * tokens * spec.rank * side, math.log(side * spec.rank) / 2) for pair in shapes for side in pair]
    # The product is scaled and added: two of its values are read or written for the one, three for the other.
    kept, moved, operators = float(spec.rank * len(shapes)), 5.0 * wide, 4 * len(shapes)
    if spec.dropout:  # what is drawn and what is left of the inputs
        into = sum(into for into, _ in shapes)
        kept, moved, operators = kept + 2 * into, moved + 5.0 * into, operators + 2 * len(shapes)
    held = sum(spec.rank * (into + out) for into, out in shapes)
    thin_ones = [pair for into, out in shapes for pair in ((into, spec.rank), (spec.rank, out))]
    unaligned = {name: getattr(block, name) + more for name, more in unaligned_flops(thin_ones, tokens).items()}
    transient = block.transient_elements
    if spec.kind == "dora":  # norms of merged weights, as if for every sample: a bound from above
        whole = sum(into * out for into, out in shapes)
        held, kept, operators = held + wide, kept + wide, operators + 8 * len(shapes)
        moved, transient = moved + 4.0 * whole / tokens, max(transient, 2.0 * max(a * b for a, b in shapes))
    return dataclasses.replace(
        block,
        parameters=block.parameters + held,
        active_parameters=block.active_parameters + held if block.active_parameters else 0,
        matmul_flops=block.matmul_flops + flops,
        moved_elements=block.moved_elements + tokens * moved,
        saved_elements=block.saved_elements + tokens * kept,
        selective_elements=block.selective_elements + tokens * (spec.rank * len(shapes) + wide),
        transient_elements=transient,
        **unaligned,
        last_flops=0.0,  # what an adapter adds to it comes after it
        operators=block.operators + operators,
        matmul_width=round(math.exp(sum(f * log for f, log in products) / sum(f for f, _ in products))),
    )


@lru_cache(maxsize=256)  # tables ask for the same few shapes
def adapted_transformer(
    shape: TransformerShape, spec: AdapterSpec, *, attention_only: bool, inputs_only: bool = False
) -> ModelProfile:
    """Return the profile of a transformer of this shape whose adapters alone are trained.

    They stand beside the linear layers of attention, of which those before its core alone where `inputs_only` is said,
    or beside those of the feed-forward too; beside experts none do.
    What is frozen rests in two bytes, or in four bits the linear layers of all blocks, adapted or not.

    Example: of Llama 2 7B with rank 16 beside attention 16.8 M parameters are trained, 0.25 % of its 6.74e9.
    """
    profile = shape.profile()
    attention, feed_forward = layers = linear_layers(shape)
    first = attention[:-1] if inputs_only else attention
    spared = FROZEN_OPERATORS * shape.norms_in_pieces
    return dataclasses.replace(
        profile,
        blocks=tuple(
            _layer(
                block,
                spec,
                layers,
                first if attention_only or block.experts else (*first, *feed_forward),
                shape.seq_len,
                spared,
            )
            if block.recomputable
            else _outside(block)
            for block in profile.blocks
        ),
    )


def _outside(block: BlockProfile) -> BlockProfile:
    """Return a frozen block outside of the layers. Nothing is computed backwards before the first adapter."""
    frozen = dataclasses.replace(block, frozen_parameters=block.parameters, narrow_parameters=block.parameters)
    if block.kind == "embedding":
        return dataclasses.replace(frozen, backward_products=0.0, saved_elements=0.0, selective_elements=0.0)
    return dataclasses.replace(frozen, backward_products=1.0)


def _layer(
    block: BlockProfile,
    spec: AdapterSpec,
    layers: tuple[Pairs, Pairs],
    adapted: Pairs,
    tokens: int,
    spared_operators: int,
) -> BlockProfile:
    """Return a layer with adapters, and with what is frozen in it."""
    attention, feed_forward = layers
    dense = [*attention] if block.experts else [*attention, *feed_forward]
    one = math.prod(block.expert_widths) if block.experts else 0  # matrix of an expert
    matrices = sum(into * out for into, out in dense) + block.expert_parameters
    trained = sum(spec.rank * (into + out) for into, out in adapted)
    is_packed = spec.base_dtype == NF4
    frozen = block.parameters - matrices * is_packed
    beside = with_adapters(block, spec, adapted, tokens)
    found = dataclasses.replace(
        beside,
        operators=beside.operators - spared_operators,
        plain_operators=beside.operators - block.operators,
        parameters=frozen + trained,
        frozen_parameters=frozen,
        narrow_parameters=frozen,
        backward_products=1 + trained / (matrices + trained),
    )
    if not is_packed:
        return found
    return dataclasses.replace(
        found,
        active_parameters=0,
        expert_parameters=0,
        packed_parameters=matrices,
        packed_layers=len(dense) + (block.expert_parameters // one if one else 0),
        unpacked_elements=max(one, *(into * out for into, out in dense)),
        unpacks=2.0,  # for the product of either pass
        unpacks_again=1.0,
    )
