"""Published transformers with adapters, counted by hand."""

from __future__ import annotations

import pytest

from paceline.spec.adapt.adapter import AdapterSpec
from paceline.task.profile.adapters import adapted_transformer
from paceline.task.profile.transformer import ExpertSizes, TransformerShape

# Two layers of 8 x 8, 8 x 4, 8 x 4, 8 x 8 and three of 8 x 20: 672 weights each, and two norms of 8.
SMALL = TransformerShape(
    "small", layers=2, hidden=8, ffn=20, heads=2, kv_heads=1, head_dim=4, vocab=10, seq_len=4, gated=True, biases=False,
    layer_norm=False, positions="rotary", tied=False,
)  # fmt: skip
OUTSIDE = 80 + 8 + 80  # embedding, last norm, head


def test_adapters_alone_are_trained_and_what_is_frozen_spares_a_product() -> None:
    profile = adapted_transformer(SMALL, AdapterSpec(kind="lora", rank=2), attention_only=True)
    thin = 2 * (16 + 12 + 12 + 16)  # rank x (in + out) of the four
    assert profile.trained_parameters == 2 * thin
    assert profile.parameters == OUTSIDE + 2 * (672 + 16 + thin)
    layer = next(block for block in profile.blocks if block.recomputable)
    assert layer.matmul_flops == 2 * 4 * (672 + thin)
    backward = layer.matmul_flops * layer.backward_products
    assert backward == pytest.approx(2 * 4 * (672 + 2 * thin)), "inputs of all, weights of the thin ones"
    assert sum(block.narrow_parameters for block in profile.blocks) == OUTSIDE + 2 * (672 + 16)
    embedding, head = profile.blocks[0], profile.blocks[-1]
    assert (embedding.backward_products, head.backward_products) == (0.0, 1.0)


def test_weights_in_four_bits_are_those_of_every_linear_layer() -> None:
    spec = AdapterSpec(kind="lora", rank=2, base_dtype="nf4")
    for attention_only in (True, False):
        profile = adapted_transformer(SMALL, spec, attention_only=attention_only)
        trained = 2 * (56 if attention_only else 56 + 3 * 28)
        assert profile.packed_parameters == 2 * 672
        assert profile.parameters == OUTSIDE + 2 * (16 + trained)
        layer = next(block for block in profile.blocks if block.recomputable)
        assert (layer.packed_layers, layer.unpacked_elements, layer.unpacks, layer.unpacks_again) == (7, 160, 2, 1)


def test_experts_are_frozen_beside_adapted_attention() -> None:
    shape = SMALL.__class__(**{**vars(SMALL), "experts": ExpertSizes(4, 2, 20)})
    profile = adapted_transformer(shape, AdapterSpec(kind="lora", rank=2), attention_only=False)
    assert profile.trained_parameters == 2 * 112
    packed = adapted_transformer(shape, AdapterSpec(kind="lora", rank=2, base_dtype="nf4"), attention_only=True)
    assert packed.packed_parameters == 2 * (192 + 4 * 480)
    assert packed.expert_parameters == 0


def test_llama_2_7b_with_rank_16() -> None:
    llama = TransformerShape(
        "llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096, gated=True, biases=False, layer_norm=False,
        positions="rotary", tied=False,
    )  # fmt: skip
    profile = adapted_transformer(llama, AdapterSpec(kind="lora", rank=16), attention_only=True)
    assert profile.trained_parameters == 32 * 4 * 16 * 8192 == 16_777_216


def test_adapters_beside_the_first_product_alone_by_hand() -> None:
    """NeMo's recipes have them beside queries, keys and values: 4,096 wide, and 4,096, 1,024 and 1,024 out."""
    llama = TransformerShape("l", 32, 4096, 14336, 32, 8, 128, 128256, 4096, gated=True, biases=False, tied=False)
    spec = AdapterSpec(kind="lora", rank=8)
    inputs = adapted_transformer(llama, spec, attention_only=True, inputs_only=True)
    whole = adapted_transformer(llama, spec, attention_only=True)
    assert inputs.trained_parameters == 32 * 8 * (3 * 4096 + 4096 + 2 * 1024)
    assert whole.trained_parameters - inputs.trained_parameters == 32 * 8 * 2 * 4096, "less the product after the core"
    assert whole.blocks[1].moved_elements - inputs.blocks[1].moved_elements == 5 * 4096 * 4096
    assert whole.blocks[1].operators - inputs.blocks[1].operators == 4
    assert (inputs.blocks[1].plain_operators, whole.blocks[1].plain_operators) == (3 * 4, 4 * 4)
