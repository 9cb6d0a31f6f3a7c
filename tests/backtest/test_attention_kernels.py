"""Whose kernel of fused attention a program runs on which chip, and what layouts casts to 8 bits write, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from backtest_examples import case_of

from paceline.backtest.price import software_of
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.programs.low import RECIPES
from paceline.plan.cost.sheet import PricedTask, Sheet

# Of 3.5 parts of attention 1 runs forward and 2.5 backward (TFLOP/s of heads of 128 in sequences of 8,192).
OTHERS = ("nanotron", "torchtitan", "pytorch-fsdp1", "deepspeed", "hai-llm", "megatron-lm", "nemo", "paxml", "mine")
FLASH_2, CUDNN = 1 / 370 + 2.5 / 318, 1 / 600 + 2.5 / 518


def sheet_of(**changes: object) -> Sheet:
    """Return the sheet of a row as its own program runs it."""
    settings: dict[str, Any] = {"zero_stage": "", **changes}
    case = case_of(**settings)
    context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software_of(case))
    return context.sheet(case.plans[0])


def attention_of(**changes: object) -> float:
    """Return the seconds of a sample's attention in a layer, over those at the fitted share of the peak."""
    sheet = sheet_of(**changes)
    at, block = next((i, one) for i, one in enumerate(sheet.context.shapes.blocks) if one.kind == "decoder")
    constants, device = read_constants(), sheet.rates.device
    rate = constants.attention_of(device.name) * sheet.context.rates("bf16").large_product_rate
    return float(sheet.attention_seconds[0, at]) / (3.5 * block.attention_flops / rate)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("program", ["megatron-bridge", "maxtext", "nemo-automodel"])
def test_programs_around_cudnn_attend_in_three_fifths_of_the_time_on_hopper(program: str, precision: str) -> None:
    found = attention_of(program=program, accelerator="H100-80GB", attention_kernel="", precision=precision)
    assert found == pytest.approx(CUDNN / FLASH_2) and found == pytest.approx(0.615, abs=1e-3)


@pytest.mark.parametrize("program", OTHERS)
def test_other_programs_attend_as_the_constants_were_fitted(program: str) -> None:
    """With FlashAttention-2; of Megatron-LM and NeMo a table tells no version, and earlier ones took it by default."""
    found = attention_of(program=program, accelerator="H100-80GB", attention_kernel="", zero_stage="fsdp3")
    assert found == pytest.approx(1.0)


@pytest.mark.parametrize("accelerator", ["A100-80GB", "B200"])
def test_cudnn_is_faster_on_hopper_alone(accelerator: str) -> None:
    """On Ampere both are as fast, and on Blackwell the share of attention was fitted with cuDNN's."""
    assert attention_of(program="megatron-bridge", accelerator=accelerator, attention_kernel="") == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kernel", "ratio"),
    [("flash", 1.0), ("sdpa flash2", 1.0), ("flash (transformer_engine)", 1.0),
     ("flash (cudnn)", 0.615), ("FlashAttention-3", 0.615), ("fa3", 0.615)],
)  # fmt: skip
def test_what_a_row_says_of_its_kernel_comes_before_the_programs_default(kernel: str, ratio: float) -> None:
    for program in ("megatron-lm", "megatron-bridge", "pytorch-fsdp2"):
        found = attention_of(program=program, accelerator="H100-80GB", attention_kernel=kernel, zero_stage="1")
        assert found == pytest.approx(ratio, abs=1e-3), program


def test_casts_write_one_layout_where_products_read_it_either_way() -> None:
    """Scales of whole tensors: 1 B less of each value on Blackwell; blocks have other scales in the other direction."""
    for name, hopper, blackwell in (("delayed", 4.0, 3.0), ("current", 6.0, 5.0), ("mxfp8", 4.0625, 4.0625)):
        assert [RECIPES[name].bytes_on(family) for family in ("hopper", "blackwell")] == [hopper, blackwell]
    assert RECIPES["tensorwise"].bytes_on("blackwell") == 6.0, "torchao's kernels turn over what they cast"
    row = {"program": "megatron-lm", "zero_stage": "1", "precision": "fp8", "attention_kernel": ""}
    moved = {}
    for chip in ("H100-80GB", "B200"):
        sheet = sheet_of(accelerator=chip, **row)
        at, block = next((i, one) for i, one in enumerate(sheet.context.shapes.blocks) if one.kind == "decoder")
        values = block.matmul_flops / block.matmul_width
        moved[chip] = float(sheet.cast_seconds[0, at]) * sheet.rates.memory_rate / values
    assert moved == pytest.approx({"H100-80GB": 4.0, "B200": 3.0})
