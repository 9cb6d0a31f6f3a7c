"""The five FLOP conventions give what their formulas, written out as printed, give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.plan.flops import CONVENTIONS, convention_of, flops_per_sample
from paceline.task.profile.transformer import ExpertSizes, TransformerShape

LAYERS, HIDDEN, SEQ, VOCAB = 96, 12288, 2048, 51200
GPT = TransformerShape("gpt-175B", LAYERS, HIDDEN, 4 * HIDDEN, 96, 96, 128, VOCAB, SEQ, biases=False, positions="none")
PROFILE = GPT.profile()
UNTIED = replace(GPT, tied=False).profile()
N = PROFILE.parameters


def test_hardware_flops_are_equation_3_of_narayanan() -> None:
    expected = 96 * SEQ * LAYERS * HIDDEN**2 * (1 + SEQ / (6 * HIDDEN) + VOCAB / (16 * LAYERS * HIDDEN))
    assert flops_per_sample(PROFILE, "hardware") == pytest.approx(expected, rel=1e-12)


def test_model_flops_are_those_of_korthikanti() -> None:
    expected = 72 * SEQ * LAYERS * HIDDEN**2 * (1 + SEQ / (6 * HIDDEN) + VOCAB / (12 * LAYERS * HIDDEN))
    assert flops_per_sample(PROFILE, "model") == pytest.approx(expected, rel=1e-12)


def test_six_n_with_and_without_the_input_embedding() -> None:
    attention = 12 * LAYERS * HIDDEN * SEQ
    assert flops_per_sample(UNTIED, "6n") == SEQ * (6 * UNTIED.parameters + attention)
    assert flops_per_sample(UNTIED, "6n-embedding") == SEQ * (6 * (UNTIED.parameters - VOCAB * HIDDEN) + attention)
    assert flops_per_sample(PROFILE, "6n-embedding") == flops_per_sample(PROFILE, "6n")  # its products count: the head


def test_the_causal_half() -> None:
    expected = SEQ * (6 * (UNTIED.parameters - VOCAB * HIDDEN) + 6 * LAYERS * HIDDEN * SEQ)
    # N also counts the norms' vectors, which are in no product.
    assert flops_per_sample(UNTIED, "causal") == pytest.approx(expected, rel=1e-4)


def test_attention_that_is_not_causal_is_whole_in_every_convention() -> None:
    encoder = replace(GPT, causal=False).profile()
    assert (
        flops_per_sample(encoder, "causal") == flops_per_sample(encoder, "model") == flops_per_sample(PROFILE, "model")
    )


def test_of_a_mixture_only_active_parameters_count() -> None:
    shape = TransformerShape("moe", 2, 512, 1024, 8, 8, 64, 1000, 128, gated=True, experts=ExpertSizes(64, 2, 1024))
    profile = shape.profile()
    dense = replace(shape, experts=None, ffn=2048).profile()
    assert flops_per_sample(profile, "6n") == pytest.approx(flops_per_sample(dense, "6n"), rel=0.05)


def test_the_same_run_is_stated_a_third_apart() -> None:
    values = [flops_per_sample(PROFILE, name) for name in CONVENTIONS]
    assert max(values) / min(values) > 1.3


@pytest.mark.parametrize(
    ("text", "name"),
    [("6n", "6n"), ("causal", "causal"), ("96*B*s*L*h^2*(1+s/6h+V/16Lh)", "hardware"), ("72 * B * s ...", "model"),
     ("hardware FLOPs incl. recompute", "hardware"), ("6*(N - input embedding) + 12*L*h*s", "6n-embedding"),
     ("6*(N - input embedding) + 6*L*h*s (causal halved)", "causal"), ("model flops 6N + 12*L*h*s", "6n"),
     ("not stated", None), ("", None)],
)  # fmt: skip
def test_conventions_are_read_from_the_formulas_that_tables_print(text: str, name: str | None) -> None:
    assert convention_of(text) == name


def test_an_unknown_convention_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="causal"):
        flops_per_sample(PROFILE, "casual")
