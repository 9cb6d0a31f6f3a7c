"""What crosses a rack's NVLink, what recipes of 8 and 4 bits cast and leave, whose attention programs run: by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from backtest_examples import case_of

from paceline.backtest.price import software_of
from paceline.plan.cost.collectives.of_weights import gather_collectives
from paceline.plan.cost.collectives.within_passes import expert_collective
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.programs.known import MEGATRON
from paceline.plan.cost.programs.low import NVFP4, RECIPES, Recipe
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.cost.time.axes import seconds_of

OTHERS = ("nanotron", "torchtitan", "pytorch-fsdp1", "deepspeed", "hai-llm", "megatron-lm", "nemo", "paxml", "mine")
# Of 3.5 parts of attention 1 runs forward and 2.5 backward (TFLOP/s of heads of 128 in sequences of 8,192).
FLASH_2, CUDNN = 1 / 370 + 2.5 / 318, 1 / 600 + 2.5 / 518
RACK = {"accelerator": "GB200", "n_devices": 64, "devices_per_node": 4, "dp": 64, "global_batch": 128}


def sheet_of(precision: str, recipe: str = "", **changes: object) -> Sheet:
    """Return the sheet of a row of Megatron-LM's on B200, its recipe of 8 bits as named."""
    row = {"program": "megatron-lm", "zero_stage": "1", "accelerator": "B200", "precision": precision, **changes}
    case = case_of(**row)
    software = dataclasses.replace(MEGATRON, recipe=recipe or MEGATRON.recipe)
    return PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software).sheet(case.plans[0])


def test_weights_are_gathered_over_a_racks_nvlink_though_a_host_has_four_devices() -> None:
    """64 devices of 16 hosts: a ring of 63 hops at NVLink's rate for each of 65 gathers, and no adapter anywhere."""
    case = case_of(program="torchtitan", zero_stage="fsdp3", **RACK)
    context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software_of(case))
    sheet, constants = context.sheet(case.plans[0]), read_constants()
    assert case.plans[0].layout.dp_shard == 64 and case.plans[0].accumulation == 1
    dense, _ = gather_collectives(sheet)
    wire = 63 / 64 * float(dense.buffer_bytes[0]) / (900e9 * constants.node_link_share)
    waits = float(dense.calls[0]) * (63 * constants.node_hop_seconds + constants.collective_seconds)
    assert float(seconds_of(sheet.ring("fsdp"), dense)[0]) == pytest.approx(wire + waits)
    assert float(dense.buffer_bytes[0]) == pytest.approx(2 * 2 * case.profile.parameters, rel=0.05), "twice, in bf16"


def test_experts_of_a_rack_are_reached_over_its_nvlink_though_a_host_has_four_devices() -> None:
    moe = {"arch": "moe", "experts": 64, "topk": 8, "ep": 64, "program": "megatron-bridge", "zero_stage": "1"}
    case = case_of(**RACK, **moe)
    context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=MEGATRON)
    sheet, constants = context.sheet(case.plans[0]), read_constants()
    routed = expert_collective(sheet)
    sent = 64 * float(sheet.slowest.total("routed_elements")[0]) * 2 * 4 * case.plans[0].micro_batch  # two bytes
    sent *= case.plans[0].accumulation / 64
    assert float(routed.buffer_bytes[0]) == pytest.approx(sent)
    wire = 63 / 64 * sent / (900e9 * constants.node_link_share)
    waits = float(routed.calls[0]) * (63 * constants.node_hop_seconds + constants.collective_seconds)
    assert float(seconds_of(sheet.ring("ep"), routed)[0]) == pytest.approx(wire + waits)


def test_a_note_of_deepep_sends_a_token_to_a_device_or_node_once() -> None:
    """8 experts of a token on 8 devices of a node lie on 5.25 of them: 8 (1 - (7/8)^8)."""
    moe = {"arch": "moe", "experts": 64, "topk": 8, "ep": 8, "program": "megatron-core", "zero_stage": "1"}
    moved = []
    for notes in ("dropless", "dropless; DeepEP", "dropless; without DeepEP"):
        case = case_of(accelerator="H100-80GB", notes=notes, **moe)
        context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software_of(case))
        moved.append(float(expert_collective(context.sheet(case.plans[0])).buffer_bytes[0]))
    assert moved[1] / moved[0] == pytest.approx(8 * (1 - (7 / 8) ** 8) / 8) and moved[2] == moved[0]


@pytest.mark.parametrize(
    ("program", "kernel", "is_first"),
    [("megatron-lm", "flash 1", True), ("megatron-lm", "FlashAttention-1", True), ("megatron-lm", "flash", False),
     ("internevo", "flash", True), ("internevo", "flash 2", False), ("internevo", "sdpa flash2", False),
     ("megatron-lm", "flash 2", False), ("megatron-lm", "flash 16", False)],
)  # fmt: skip
def test_a_row_that_names_the_version_of_its_attention_is_priced_so(program: str, kernel: str, is_first: bool) -> None:
    assert software_of(case_of(program=program, attention_kernel=kernel)).first_flash is is_first


@pytest.mark.parametrize(("chip", "is_fused"), [("V100-SXM2-32GB", False), ("A100-80GB", True), ("H100-80GB", True)])
def test_no_attention_of_a_gpt_is_taken_to_be_fused_on_a_chip_that_flash_attention_was_never_made_for(
    chip: str, is_fused: bool
) -> None:
    row = {"program": "nobody's", "zero_stage": "1", "arch": "gpt", "accelerator": chip, "precision": "fp16"}
    case = case_of(attention_kernel="", **row)
    blocks = [block for block in case.profile.blocks if block.recomputable]
    assert all(bool(block.fused_attention) is is_fused for block in blocks)
    stated = case_of(attention_kernel="flash", **row)
    assert all(block.fused_attention for block in stated.profile.blocks if block.recomputable), "as a row says"


def test_casts_that_scale_tensors_as_they_are_read_twice_those_that_scale_blocks_once() -> None:
    def moved(reads: int, scale: float, values: int) -> float:
        return reads * 2 + 2 * (1 + scale / values)  # of bf16, into two layouts of 8 bits with their scales

    # Of a whole tensor the scale is no part of the bytes; delayed scaling has it from steps before.
    whole = 1 << 30
    assert RECIPES["delayed"].cast_bytes == pytest.approx(moved(1, 4, whole))
    for name in ("current", "tensorwise"):
        assert RECIPES[name].cast_bytes == pytest.approx(moved(2, 4, whole))
    assert RECIPES["mxfp8"].cast_bytes == moved(1, 1, 32)
    assert RECIPES["blockwise"].cast_bytes == moved(1, 4, 128)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), NVFP4], ids=lambda recipe: recipe.name)
def test_a_recipe_casts_what_products_read_and_leaves_the_rest_in_bf16(recipe: Recipe) -> None:
    """Products at the recipe's part of their rate; casts of as many bytes a value; attention, head and norms as before.

    Values of products are their FLOPs over their width: of a token, a product has 2 w^2 FLOPs, and reads and writes w.
    """
    precision = "nvfp4" if recipe is NVFP4 else "fp8"
    low, plain = sheet_of(precision, recipe.name), sheet_of("bf16")
    shapes = low.context.shapes.blocks
    at = next(place for place, block in enumerate(shapes) if block.kind == "decoder")
    head = next(place for place, block in enumerate(shapes) if block.kind == "head")
    block = shapes[at]
    peak = {"fp8": 4.5e15, "nvfp4": 9e15}[precision]
    assert low.rates.peak == peak
    sheet = sheet_of(precision, "delayed")
    per_flop = sheet.rates.product_seconds_per_flop(block.matmul_width * 1.0, sheet.tokens[0], 1.0)
    assert low.product_seconds[0, at] == pytest.approx(block.matmul_flops * float(per_flop) / recipe.rate)
    cast = recipe.bytes_on("blackwell") * block.matmul_flops / block.matmul_width / low.rates.memory_rate
    assert low.cast_seconds[0, at] == pytest.approx(cast)
    assert low.moving_seconds[0, at] == pytest.approx(plain.moving_seconds[0, at] + cast / 3), "a third in each pass"
    assert low.product_seconds[0, head] == plain.product_seconds[0, head] and low.cast_seconds[0, head] == 0
    assert (low.attention_seconds == plain.attention_seconds).all()
    spared = plain.kept_bytes[0, 0, at] - low.kept_bytes[0, 0, at]
    stream, sequence, ffn = block.input_elements, 4096, 11008
    each = recipe.kept_bytes
    in_bits = (2 - each) * (2 * stream + sequence * ffn) - each * stream if each < 2 else 0.0
    assert spared == pytest.approx(in_bits), "inputs of products in fewer bits, and one more of attention's output"
    others = [place for place in range(len(shapes)) if place != at]
    assert (low.kept_bytes[:, :, others] == plain.kept_bytes[:, :, others]).all()
    assert (low.kept_bytes[2] == plain.kept_bytes[2]).all(), "a block's own input is kept in bf16"
    assert low.rates.element_bytes == 2


def sheet_of_row(**changes: object) -> Sheet:
    """Return the sheet of a row as its own program runs it."""
    settings: dict[str, Any] = {"zero_stage": "", **changes}
    case = case_of(**settings)
    context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software_of(case))
    return context.sheet(case.plans[0])


def attention_of(**changes: object) -> float:
    """Return the seconds of a sample's attention in a layer, over those at the fitted share of the peak."""
    sheet = sheet_of_row(**changes)
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
        sheet = sheet_of_row(accelerator=chip, **row)
        at, block = next((i, one) for i, one in enumerate(sheet.context.shapes.blocks) if one.kind == "decoder")
        values = block.matmul_flops / block.matmul_width
        moved[chip] = float(sheet.cast_seconds[0, at]) * sheet.rates.memory_rate / values
    assert moved == pytest.approx({"H100-80GB": 4.0, "B200": 3.0})
