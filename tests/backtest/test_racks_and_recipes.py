"""What crosses a rack's NVLink, and what each recipe of 8 and 4 bits casts and leaves in bf16, by hand."""

from __future__ import annotations

import dataclasses

import pytest
from backtest_examples import case_of

from paceline.backtest.price import software_of
from paceline.plan.cost.collectives import expert_collective, gather_collectives
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.programs.known import MEGATRON
from paceline.plan.cost.programs.low import NVFP4, RECIPES, Recipe
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.cost.time.axes import seconds_of

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
