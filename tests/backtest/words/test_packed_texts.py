"""Sequences that are packed of several texts: what a row says of them, and what their attention takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from backtest_examples import LLAMA, case_of

from paceline.backtest.price import Priced, price_cases
from paceline.backtest.words.adapters import beside_inputs
from paceline.backtest.words.texts import text_tokens
from paceline.plan.cost.programs.known import MEGATRON_BRIDGE, NEMO, SQUAD_TOKENS

TUNED = replace(LLAMA, program="nemo", zero_stage="", accelerator="H100-80GB", notes="fine-tuning SFT")


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, SQUAD_TOKENS),
        ({"notes": "fine-tuning LoRA"}, SQUAD_TOKENS),
        ({"notes": "Finetuning; LoRA"}, SQUAD_TOKENS),
        ({"notes": "container 24.07; Pretraining"}, 0),
        ({"notes": ""}, 0),
        ({"notes": "fine-tuning SFT, unpacked"}, 0),
        ({"notes": "fine-tuning of mock data"}, 0),
        ({"seq_len": 128}, 0),
        ({"program": "megatron-bridge"}, 0),
        ({"program": "pytorch-fsdp2"}, 0),
        ({"program": "pytorch-fsdp2", "notes": "packed texts of about 2,823 tokens"}, 2823),
        ({"notes": "fine-tuning SFT, documents of 512 tokens"}, 512),
        ({"notes": "pretraining, samples of 8192 tokens"}, 0),
        ({"program": "pytorch-fsdp2", "notes": "texts of 512 tokens, padded"}, 0),
    ],
)
def test_what_a_row_says_of_its_texts(changes: dict[str, object], tokens: int) -> None:
    marks: list[str] = []
    assert text_tokens(replace(TUNED, **changes), marks) == tokens  # type: ignore[arg-type]
    assert bool(marks) is (tokens == SQUAD_TOKENS), "what a program does is assumed, what a row says is not"
    assert (NEMO.tunes_texts, MEGATRON_BRIDGE.tunes_texts) == (SQUAD_TOKENS, 0)


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({}, True), ({"notes": "fine-tuning LoRA of attention"}, False), ({"program": "trl"}, False),
        ({"notes": "fine-tuning LoRA of all linear layers"}, False), ({"program": "megatron-bridge"}, False),
    ],
)  # fmt: skip
def test_nemos_adapters_are_beside_the_first_product_of_attention(changes: dict[str, object], beside: bool) -> None:
    row = replace(TUNED, **{"notes": "fine-tuning LoRA", **changes})  # type: ignore[arg-type]
    assert beside_inputs(row) is beside
    if "linear" not in row.notes:  # a Llama whose every product of attention is 4,096 wide
        assert case_of(row).profile.trained_parameters == 32 * 16 * 2 * 4096 * (3 if beside else 4)


def test_attention_between_texts_takes_no_time_and_is_still_counted_by_conventions() -> None:
    """NeMo's fine-tuning of SQuAD in sequences of 4,096 was told with attention between its texts, 22 to 41 % long."""
    tuned, trained = case_of(TUNED), case_of(TUNED, notes="")
    seconds = []
    for case in (tuned, trained):
        (priced,) = price_cases([case])
        assert isinstance(priced, Priced)
        seconds.append(sum(term.seconds for term in priced.terms if term.kind == "attention"))
    assert seconds[0] == pytest.approx(seconds[1] * SQUAD_TOKENS / TUNED.seq_len)  # type: ignore[operator]
    assert tuned.flops_per_step == trained.flops_per_step
