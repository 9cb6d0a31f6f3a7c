"""The profile of the built-in decoder with experts, from its shape alone. Imports no torch.

A token passes `top_k` experts and the shared ones: products and activations are those of a feed-forward layer of their
joint width, parameters those of all experts. Experts are taken to be evenly loaded, as balancing makes them.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.spec.profile import ROUTING_MOVES, BlockProfile, ModelProfile, TensorLimits
from paceline.task.models.shape import MoEConfig
from paceline.task.profile.closed import closed_axes
from paceline.task.profile.decoder import decoder_layer, profile_decoder, width_of
from paceline.task.profile.transformer import ROUTING_OPERATORS

OPERATORS_PER_EXPERT = 5  # two products, split, silu, product; a grouped kernel launches fewer


def profile_moe(config: MoEConfig, seq_len: int) -> ModelProfile:
    """Return the profile of a decoder with experts on samples of `seq_len` tokens: embedding, layers, norm, head."""
    plain = profile_decoder(config, seq_len)
    routed = _routed_layer(config, seq_len)
    layers = [
        replace(routed if index >= config.dense_layers else block, name=block.name)
        for index, block in enumerate(plain.blocks[1:-2])
    ]
    return replace(
        plain,
        blocks=(plain.blocks[0], *layers, *plain.blocks[-2:]),
        closed_axes=closed_axes("tp", "cp", "pp", "ep"),
        tensor_limits=_tensor_limits(config),
    )


def _tensor_limits(config: MoEConfig) -> TensorLimits:
    """Return what the tensor axis must respect: as of a decoder without experts, and a part of every expert's width."""
    widths = [config.expert_ffn, *([config.ffn] if config.dense_layers else [])]
    return TensorLimits(
        counts={"heads": config.heads, "kv_heads": config.kv_heads},
        splits=(config.vocab, config.kv_width, *widths, config.shared_ffn or config.expert_ffn),
        widths=(config.hidden,),
        splits_sequence=True,
    )


def _routed_layer(config: MoEConfig, seq: int) -> BlockProfile:
    active = decoder_layer(replace(config, ffn=config.top_k * config.expert_ffn + config.shared_ffn), seq)
    hidden, top_k, experts = config.hidden, config.top_k, config.experts
    rows = seq * top_k * hidden
    beside = [(hidden, config.q_width), (hidden, config.kv_width), (hidden, config.kv_width), (config.q_width, hidden),
              (hidden, experts), *([(hidden, config.shared_ffn)] * 3 if config.shared_ffn else [])]  # fmt: skip
    return replace(
        active,
        kind="experts",
        parameters=config.routed_layer_parameters,
        matmul_flops=active.matmul_flops + 2.0 * seq * hidden * experts,
        moved_elements=active.moved_elements + ROUTING_MOVES * rows + 4.0 * seq * experts,
        # Kept besides: each expert's input rows and results, and the router's probabilities in fp32.
        saved_elements=active.saved_elements + 2.0 * rows,
        saved_fp32_elements=active.saved_fp32_elements + 2.0 * seq * experts,
        selective_elements=active.selective_elements + rows + seq * experts,
        transient_elements=active.transient_elements + 2.0 * rows,
        operators=active.operators + ROUTING_OPERATORS + OPERATORS_PER_EXPERT * experts,
        matmul_width=width_of(beside),
        experts=experts,
        expert_parameters=config.expert_parameters,
        active_parameters=config.routed_layer_parameters - config.expert_parameters * (experts - top_k) // experts,
        expert_widths=(hidden, config.expert_ffn),
        routed_elements=float(rows),
        routed_flops=2.0 * seq * top_k * 3 * hidden * config.expert_ffn,
        last_flops=0.0,  # results are weighed
    )
