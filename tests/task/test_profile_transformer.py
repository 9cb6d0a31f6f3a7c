"""Profiles of published families count the parameters, FLOPs and bytes that their publications print."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.task.models.sizes import NAMED_SIZES
from paceline.task.profile.decoder import profile_decoder
from paceline.task.profile.transformer import ExpertSizes, Latent, TransformerShape

GPT3 = TransformerShape("gpt-175B", 96, 12288, 49152, 96, 96, 128, 51200, 2048)
MODERN = {"gated": True, "biases": False, "layer_norm": False, "positions": "rotary", "tied": False}


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [  # sums over the tensors of the released checkpoints
        (TransformerShape("bloom", 70, 14336, 57344, 112, 112, 128, 250880, 2048, positions="alibi",
                          embedding_norm=True),
         176_247_271_424),
        (TransformerShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192, **MODERN), 8_030_261_248),
        (TransformerShape("llama-3-405b", 126, 16384, 53248, 128, 8, 128, 128256, 8192, **MODERN), 405_853_388_800),
        (TransformerShape("mixtral", 32, 4096, 14336, 32, 8, 128, 32000, 4096, **MODERN,
                          experts=ExpertSizes(8, 2, 14336)),
         46_702_792_704),
    ],
    ids=lambda value: value.name if isinstance(value, TransformerShape) else "",
)  # fmt: skip
def test_parameters_are_those_of_the_released_models(shape: TransformerShape, parameters: int) -> None:
    assert shape.profile().parameters == parameters


@pytest.mark.parametrize(
    ("shape", "total_billion", "active_billion"),
    [  # as printed: DeepSeek-V2 236B / 21B, DeepSeek-V3 671B / 37B, Qwen3 30.5B / 3.3B
        (TransformerShape("v2", 60, 5120, 12288, 128, 128, 128, 102400, 4096, **MODERN,
                          experts=ExpertSizes(160, 6, 1536, 3072, 1), latent=Latent(1536, 512, 128, 64, 128)), 236, 21),
        (TransformerShape("v3", 61, 7168, 18432, 128, 128, 128, 129280, 4096, **MODERN,
                          experts=ExpertSizes(256, 8, 2048, 2048, 3), latent=Latent(1536, 512, 128, 64, 128)), 671, 37),
        (TransformerShape("qwen3", 48, 2048, 6144, 32, 4, 128, 151936, 4096, **MODERN,
                          experts=ExpertSizes(128, 8, 768)),
         30.5, 3.3),
    ],
    ids=["v2", "v3", "qwen3"],
)  # fmt: skip
def test_mixtures_have_the_printed_parameters(
    shape: TransformerShape, total_billion: float, active_billion: float
) -> None:
    profile = shape.profile()
    assert profile.parameters / 1e9 == pytest.approx(total_billion, rel=0.003)
    assert profile.active_parameters / 1e9 == pytest.approx(active_billion, rel=0.025)


def test_a_layer_keeps_the_bytes_of_korthikanti() -> None:
    # Equation 1 of arXiv:2205.05198: s b h (34 + 5 a s / h) bytes, and 34 s b h without attention's core (section 5).
    seq, hidden, heads = 2048, 12288, 96
    layer = replace(GPT3, flash=False, dropout=True).profile().blocks[1]
    assert 2 * layer.saved_elements == seq * hidden * (34 + 5 * heads * seq / hidden)
    assert 2 * layer.selective_elements == 34 * seq * hidden
    assert 2 * layer.input_elements == 2 * seq * hidden


def test_fused_attention_keeps_no_scores_and_computes_half_of_them() -> None:
    fused, unfused = GPT3.profile().blocks[1], replace(GPT3, flash=False).profile().blocks[1]
    assert unfused.attention_flops == 2 * fused.attention_flops
    assert unfused.saved_elements - fused.saved_elements == 96 * 2048 * 2048
    assert unfused.moved_elements > fused.moved_elements


def test_a_llama_is_counted_as_the_decoder_of_our_own() -> None:
    config = replace(NAMED_SIZES["llama-8b"], vocab=128256)
    ours = profile_decoder(config, 8192)
    theirs = TransformerShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192, **MODERN).profile()
    assert theirs.parameters == ours.parameters
    assert theirs.forward_flops == ours.forward_flops


def test_experts_every_other_layer_and_attention_to_an_encoder() -> None:
    shape = TransformerShape("t5", 4, 64, 128, 4, 4, 16, 100, 32, positions="none", biases=False, layer_norm=False,
                             cross_attention_layers=2, experts=ExpertSizes(8, 1, 128, every=2))  # fmt: skip
    plain = replace(shape, cross_attention_layers=0, experts=None).profile()
    profile = shape.profile()
    assert [block.kind for block in profile.blocks[1:5]] == ["decoder", "experts", "decoder", "experts"]
    assert profile.parameters > plain.parameters
    crossed = replace(shape, experts=None).profile()
    assert crossed.parameters - plain.parameters == 2 * (4 * 64 * 64 + 64)
