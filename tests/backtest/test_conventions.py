"""What a table's program and its open settings mean, by hand on round numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from backtest_examples import case_of

from paceline.backtest.anchor import ROWS, anchor_factor, anchor_smallest, anchored_seconds, trust
from paceline.backtest.price import Interval, Priced, TermSeconds, contexts_of, price_cases, software_of
from paceline.backtest.score import Scored
from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost import pricing
from paceline.plan.cost.collectives.of_weights import gather_collectives, reduce_collectives
from paceline.plan.cost.collectives.within_passes import context_collectives, expert_collective, stream_collectives
from paceline.plan.cost.constants import FittedOn, read_constants
from paceline.plan.cost.intervals import waiting_parts
from paceline.plan.cost.programs.known import (
    DEEPSPEED,
    EAGER_LOGITS,
    MAXTEXT,
    MEGATRON,
    MEGATRON_BRIDGE,
    NEMO,
    PROGRAMS,
    TORCHTITAN,
    program_of,
)
from paceline.plan.cost.programs.low import RECIPES, recipe_of
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.cost.software import Software
from paceline.plan.cost.time.axes import SENDING_UNITS
from paceline.plan.cost.time.compute import optimizer_component
from paceline.plan.cost.time.ring import ring
from paceline.plan.cost.unknown import (
    CHIP,
    COMMUNICATING,
    EXPERTS,
    HELD,
    PROGRAM,
    UNNAMED,
    held_widths,
    time_widths,
)
from paceline.plan.search.values import TIE_RATIO
from paceline.spec.cluster import ClusterSpec
from paceline.spec.forecast import Z80, Z95
from paceline.spec.layout import Layout
from paceline.task.profile.transformer import TransformerShape


def sheet_of(software: Software, **changes: object) -> Sheet:
    """Return the sheet of a row's first plan, priced as a program."""
    case = case_of(**changes)
    return PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software).sheet(case.plans[0])


def place_of(sheet: Sheet, kind: str) -> int:
    """Return which of a sheet's different blocks is of a kind."""
    return next(place for place, block in enumerate(sheet.context.shapes.blocks) if block.kind == kind)


@pytest.mark.parametrize("program", PROGRAMS)
def test_conventions_are_looked_up_by_the_program_and_by_nothing_else(program: str) -> None:
    found = {software_of(case_of(program=program, source=source)).name for source in ("nanotron", "nemo bridge", "")}
    assert found == {PROGRAMS[program].name}
    assert software_of(case_of(program=program, precision="fp16", zero_stage="1")).name == PROGRAMS[program].name


def test_an_unknown_program_is_marked_and_priced_by_how_it_shards() -> None:
    sharded, whole = case_of(program="mine"), case_of(program="", zero_stage="0")
    assert software_of(sharded).name == "PyTorch FSDP" and "program mine priced as PyTorch FSDP" in sharded.marks
    assert software_of(whole).name == "Megatron-LM" and "no program stated: priced as Megatron-LM" in whole.marks
    named, unnamed = price_cases([case_of(program="megatron-lm", zero_stage="0"), whole])
    assert isinstance(named, Priced) and isinstance(unnamed, Priced)
    assert (named.program, unnamed.program) == ("Megatron-LM", "")
    assert named.step_seconds.value == unnamed.step_seconds.value, "conventions are those of the one"
    assert unnamed.step_seconds.high_80 > 1.1 * named.step_seconds.high_80, "and the interval says that it is a guess"


def test_gradients_of_megatron_are_of_two_bytes_in_fp16_alone() -> None:
    half, wide = (software_of(case_of(program="megatron-lm", zero_stage="1", precision=p)) for p in ("fp16", "bf16"))
    assert (half.gradient_bytes, half.reduce_bytes, wide.gradient_bytes) == (2, 2, 4)


def test_zero_2_reduces_once_a_step_in_megatron_and_every_micro_batch_in_fsdp() -> None:
    # 8 devices, 64 sequences, micro-batches of 2: four a step.
    once, each = (sheet_of(s, zero_stage="2") for s in (MEGATRON, replace(TORCHTITAN, reduce_bytes=4)))
    (first, _), (second, _) = reduce_collectives(once), reduce_collectives(each)
    assert each.columns.accumulation[0] == 4
    assert second.buffer_bytes[0] == pytest.approx(4 * first.buffer_bytes[0])


def test_a_loss_that_is_compiled_with_its_model_keeps_logits_in_16_bits() -> None:
    """2 B a logit instead of 6 of separate kernels, from the forward to the backward pass."""
    row = {"zero_stage": "0", "compile": 1}
    kept = []
    for program in ("nanogpt", "ddp"):
        sheet = sheet_of(software_of(case_of(program=program, **row)), program=program, **row)
        kept.append(float(sheet.kept_bytes[0, 0, place_of(sheet, "head")]))
    assert kept[1] - kept[0] == pytest.approx((6 - 2) * 32000 * 4096)


def test_torchtitan_gathers_once_in_pipelines_and_cuts_a_batch_by_stages() -> None:
    row = {"program": "torchtitan", "pp": 2, "dp": 4, "micro_batch": None, "pp_schedule": "1f1b"}
    (plan,) = case_of(**row).plans
    assert (plan.zero, plan.layout.dp_shard, plan.accumulation, plan.micro_batch) == (1, 4, 2, 8), "16 samples in two"
    (plan,) = case_of(**{**row, "pp_schedule": "interleaved_1f1b"}).plans
    assert (plan.zero, plan.accumulation, plan.micro_batch) == (1, 4, 4), "two stages on each of two devices"
    assert {plan.accumulation for plan in case_of(program="torchtitan", micro_batch=None).plans} == {1, 2, 4, 8}
    assert case_of(program="torchtitan").plans[0].zero == 3
    assert {plan.zero for plan in case_of(**{**row, "program": "pytorch-fsdp2", "dp": 4}).plans} == {3}


def test_deepspeed_gathers_by_matrix_and_a_third_time_what_may_not_stay_live() -> None:
    row = {"program": "deepspeed", "zero_stage": "3"}
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    tight = replace(DEEPSPEED, live_parameters=layer / 4)
    full, none, roomy = (
        gather_collectives(sheet_of(software, recompute=mode, **row))[0]
        for software, mode in ((tight, "full"), (tight, "none"), (DEEPSPEED, "full"))
    )
    each = 4 * 2  # micro-batches, bytes
    again = full.buffer_bytes[0] - none.buffer_bytes[0]
    assert again == pytest.approx(each * 32 * layer * 3 / 4, rel=0.05), "but for the ends and norms"
    assert full.calls[0] == pytest.approx(none.calls[0] * (2 + 3 / 4) / 2, rel=0.05)
    assert roomy.buffer_bytes[0] == none.buffer_bytes[0], "a block of 0.2e9 stays where 1e9 may be live"
    assert 32 * 4 < none.calls[0] / 4 / 2 < 32 * 7, "as many calls as matrices, forward and backward"
    fsdp = [gather_collectives(sheet_of(TORCHTITAN, recompute=mode))[0].buffer_bytes[0] for mode in ("full", "none")]
    assert fsdp[0] == fsdp[1], "FSDP2 computes again on what its backward pass has gathered"


def test_deepspeeds_own_engine_reduces_in_the_dtype_that_it_trains_in() -> None:
    row = {"program": "deepspeed", "zero_stage": "2"}  # four micro-batches a step
    case = case_of(**row)
    (reduced, _) = reduce_collectives(sheet_of(software_of(case), **row))
    assert float(reduced.buffer_bytes[0]) == pytest.approx(4 * 2 * case.profile.parameters)


def test_buckets_of_the_distributed_optimizer_grow_with_the_ranks() -> None:
    for ranks, expected in ((8, 169), (64, 106)):  # 6.74e9 parameters in buckets of 40 and of 64 million
        sheet = sheet_of(MEGATRON, zero_stage="1", n_devices=ranks, dp=ranks, global_batch=2 * ranks)
        assert gather_collectives(sheet)[0].calls[0] == expected


def test_copies_that_share_a_sequence_reduce_once_a_step_and_gather_no_weights_by_micro_batch() -> None:
    (plan,) = case_of(program="megatron-lm", zero_stage="0", cp=2, dp=4).plans
    assert (plan.layout, plan.zero) == (Layout(dp_replicate=4, cp=2), 0)
    sheet = sheet_of(MEGATRON, zero_stage="0", cp=2, dp=4)
    gathers, reduces = gather_collectives(sheet)[0], reduce_collectives(sheet)[0]
    assert gathers.calls[0] == reduces.calls[0], "once a step, whatever the micro-batches"
    assert gathers.buffer_bytes[0] == 2 * sheet.context.profile.parameters
    assert reduces.buffer_bytes[0] == 4 * sheet.context.profile.parameters


def test_recompute_of_a_program_ends_as_its_code_has_it() -> None:
    """torch's checkpoint stops early since 2.1; Megatron-LM has its own, and LLM Foundry's tables are of 1.13."""
    whole = ("megatron-lm", "nemo", "deepspeed", "llm-foundry")
    assert not any(program_of(name, "")[0].stops_early for name in whole)
    assert all(program_of(name, "")[0].stops_early for name in ("torchtitan", "pytorch-fsdp2", "maxtext", "nanotron"))


def test_a_rate_per_gpu_is_not_shared_by_the_node() -> None:
    alone, node = (case_of(n_devices=16, dp=16, inter_bw=text) for text in ("200Gbps RoCE/GPU", "1600Gbps/node"))
    assert alone.cluster.links[-1].bytes_per_second.value == node.cluster.links[-1].bytes_per_second.value == 25e9


def test_what_is_open_is_resolved_jointly_as_the_fastest_that_fits() -> None:
    row = {"program": "megatron-lm", "zero_stage": "", "recompute": "", "micro_batch": None, "pp": 2, "dp": 4,
           "pp_schedule": "interleaved_1f1b"}  # fmt: skip
    case = case_of(**row)
    assert {(plan.layout.dp_shard, plan.layout.dp_replicate) for plan in case.plans} == {(4, 1), (1, 4)}
    assert {plan.virtual_stages for plan in case.plans} == {2, 4, 8, 16}
    assert {plan.recompute for plan in case.plans} == {"none", "selective", "full", "budget"}
    assert all(plan.accumulation % 2 == 0 for plan in case.plans), "interleaved schedules go round the stages"
    (priced,) = price_cases([case])
    assert isinstance(priced, Priced) and priced.fits
    (context, _), memory = contexts_of([case], read_constants())[0], case.cluster.device.memory_bytes.value
    sheet = context.sheet(*case.plans)
    fitting = pricing.total(pricing.without(pricing.memory_components(sheet), "cache")) <= memory
    seconds = pricing.total(pricing.time_components(sheet))
    assert fitting.any() and not fitting.all()
    held = pricing.total(pricing.without(pricing.memory_components(sheet), "cache"))
    tied = fitting & (seconds <= TIE_RATIO * float(seconds[fitting].min()))
    assert priced.step_seconds.value == pytest.approx(float(seconds[tied][np.argmin(held[tied])]))


def test_shards_beside_copies_are_read_from_their_degrees_or_left_open() -> None:
    big = {"n_devices": 64, "dp": 64, "global_batch": 128, "program": "maxtext"}
    (plan,) = case_of(zero_stage="fsdp ici=8 dcn=2 dp=4", **big).plans
    assert (plan.layout, plan.zero) == (Layout(dp_shard=16, dp_replicate=4), 3)
    found = [plan.layout for plan in case_of(zero_stage="fsdp+dp", **big).plans]
    assert [(layout.dp_shard, layout.dp_replicate) for layout in found] == [(8, 8), (16, 4), (32, 2), (64, 1)]


@pytest.mark.parametrize(
    ("device", "devices", "per_node", "domain"),
    [("gb200", 64, 4, 64), ("gb200", 512, 4, 64), ("gb200", 144, 4, 72), ("h100-sxm", 64, 4, 4), ("gb200", 72, 0, 72),
     ("tpu-v5p", 512, 4, 512)],
)  # fmt: skip
def test_links_come_from_the_fabric_and_not_from_the_host(
    device: str, devices: int, per_node: int, domain: int
) -> None:
    cluster, _ = resolve_cluster(ClusterSpec(device, devices=devices, devices_per_node=per_node))
    assert cluster.domain == domain


def test_an_all_to_all_inside_a_rack_is_priced_over_its_nvlink() -> None:
    cluster, _ = resolve_cluster(ClusterSpec("gb200", devices=64, devices_per_node=4))
    constants = read_constants()
    group = ring(cluster, constants, np.array([16]), np.array([1]))
    waits = 15 * constants.node_hop_seconds + constants.collective_seconds
    by_hand = 15 / 16 * 1e9 / (900e9 * constants.node_link_share) + waits
    assert group.nodes[0] == 1
    assert group.seconds("all_to_all", np.array([1e9]), np.ones(1))[0] == pytest.approx(by_hand)


def test_torchtitan_keeps_attention_and_every_other_product_and_computes_the_rest_again() -> None:
    shape = TransformerShape("x", 2, 4096, 14336, 32, 8, 128, 1000, 8192, gated=True, biases=False, tied=False)
    layer = replace(shape, selective_products=0.5).profile().blocks[1]
    # Its input, attention's output with two numbers a head, and half of what seven products write.
    written = 4096 + 2 * 1024 + 2 * 14336 + 2 * 4096
    assert layer.selective_elements == 8192 * (4096 + 4096 + 2 * 32 + written / 2)
    sheet = sheet_of(TORCHTITAN, recompute="selective", program="torchtitan")
    again = sheet.again_seconds[1] - sheet.moving_seconds
    assert again[0] == pytest.approx(0.5 * sheet.product_seconds[0])


@pytest.mark.parametrize(("recompute", "several"), [("none", 8), ("selective", 10), ("full", 11)])
def test_torchtitan_gathers_the_stream_again_and_keeps_its_sums(recompute: str, several: int) -> None:
    """A layer's four collectives in each pass; again its two gathers, or in full recompute all but the last sum."""
    row = {"program": "torchtitan", "tp": 4, "dp": 2, "recompute": recompute, "micro_batch": 8, "global_batch": 16}
    calls = []
    for layers in (8, 9):
        sheet = sheet_of(TORCHTITAN, **row, layers=layers)
        calls.append(sum(float(each.calls[0]) for each in stream_collectives(sheet)))
    assert calls[1] - calls[0] == several


def test_fp8_casts_operands_and_leaves_the_head_in_bf16() -> None:
    row = {"program": "torchtitan", "precision": "fp8", "accelerator": "H100-80GB"}
    quick, rowwise = (sheet_of(replace(TORCHTITAN, recipe=name), **row) for name in ("tensorwise", "rowwise"))
    at, last = place_of(quick, "decoder"), place_of(quick, "head")
    block = quick.context.shapes.blocks[at]
    values = block.matmul_flops / block.matmul_width
    assert quick.cast_seconds[0, at] == pytest.approx(6 * values / quick.rates.memory_rate)
    assert rowwise.product_seconds[0, at] == pytest.approx(quick.product_seconds[0, at] / RECIPES["rowwise"].rate)
    in_bf16 = sheet_of(TORCHTITAN, **{**row, "precision": "bf16"})
    assert quick.product_seconds[0, last] == pytest.approx(in_bf16.product_seconds[0, last])
    assert quick.cast_seconds[0, last] == 0
    assert [recipe_of(text, "delayed") for text in ("fp8-cs", "fp8-rowwise", "mxfp8", "fp8")] == [
        "current", "rowwise", "mxfp8", "delayed"]  # fmt: skip


def test_fp4_has_its_own_rate_where_the_chip_has_one_and_is_never_taken_as_bf16() -> None:
    row = {"program": "megatron-lm", "precision": "nvfp4", "zero_stage": "1"}
    quick, plain = (sheet_of(MEGATRON, **{**row, "accelerator": "B200", "precision": p}) for p in ("nvfp4", "bf16"))
    at = place_of(quick, "decoder")
    assert quick.rates.peak == 9e15 and quick.columns.precision == "fp4"
    assert quick.product_seconds[0, at] < plain.product_seconds[0, at] and quick.cast_seconds[0, at] > 0
    assert price_cases([case_of(**row)]) == ["no rate of fp4 products of NVIDIA A100 SXM4 80GB"]


def test_weights_of_nemo_are_gathered_in_fp8_but_where_scales_are_of_blocks() -> None:
    """6.7e9 parameters once a step: a byte each in fp8, two where a scale is of a part of a weight, and in bf16."""
    row = {"zero_stage": "1", "accelerator": "H100-80GB", "n_devices": 8, "dp": 8}
    sizes = {
        (software.name, precision): gather_collectives(
            sheet_of(replace(software, recipe=recipe_of(precision, software.recipe)), precision=precision, **row)
        )[0].buffer_bytes[0]
        for software in (NEMO, MEGATRON)
        for precision in ("fp8-cs", "mxfp8", "fp8-blockwise", "bf16")
    }
    parameters = case_of(**row).profile.parameters
    for precision, each in (("fp8-cs", 1), ("mxfp8", 1), ("fp8-blockwise", 2), ("bf16", 2)):
        assert sizes["NeMo", precision] == pytest.approx(each * parameters, rel=1e-3), precision
        assert sizes["Megatron-LM", precision] == pytest.approx(2 * parameters, rel=1e-3)


def test_products_in_nvfp4_take_half_of_the_arithmetic_of_fp8_over_nine_tenths() -> None:
    """9,000 TFLOP/s in place of 4,500 spare half of the arithmetic; what is left, moved operands too, is over 0.9."""
    row = {"program": "megatron-lm", "zero_stage": "1", "accelerator": "B200"}
    narrow, wide = (sheet_of(MEGATRON, **row, precision=precision) for precision in ("nvfp4", "fp8"))
    at, last = (place_of(narrow, kind) for kind in ("decoder", "head"))
    spared = narrow.context.shapes.blocks[at].matmul_flops / (2 * 4.5e15 * narrow.rates.sustained_share)
    assert narrow.product_seconds[0, at] == pytest.approx((wide.product_seconds[0, at] - spared) / 0.9)
    assert narrow.product_seconds[0, last] == wide.product_seconds[0, last]  # the head is in bf16


def test_mixtures_of_megatron_bridge_in_mxfp8_run_as_one_graph_since_gb200() -> None:
    """No operator is started by the host, and of a second of routing over 8 passes of one group an eighth shows.

    The rest comes beside another micro-batch's computing, and holds it up by the part of the device that sends.
    """
    moe = {"arch": "moe", "experts": 8, "topk": 2, "ep": 8, "program": "megatron-bridge", "zero_stage": "1"}
    chips, precisions = ("GB200", "GB300", "B300", "B200", "H100-80GB"), ("mxfp8", "fp8-cs")
    captured = [
        (chip, precision)
        for chip, precision in itertools.product(chips, precisions)
        if software_of(case_of(**moe, accelerator=chip, precision=precision)).captured
    ]
    assert captured == [("GB200", "mxfp8"), ("GB300", "mxfp8"), ("B300", "mxfp8")]
    assert not software_of(case_of(**{**moe, "program": "nemo"}, accelerator="GB200", precision="mxfp8")).captured
    row = {**moe, "accelerator": "GB200", "precision": "mxfp8", "micro_batch": 1}
    terms = []
    for is_graph in (False, True):
        sheet = sheet_of(replace(MEGATRON_BRIDGE, recipe="mxfp8", captured=is_graph), **row)
        terms.append({term.name: float(term.values[0]) for term in pricing.time_components(sheet)})
    plain, graph = terms
    assert plain["operator launches"] > 0 and graph["operator launches"] == 0
    routed = plain["expert all-to-all"]
    assert graph["expert all-to-all"] == pytest.approx(routed / 8 + SENDING_UNITS * routed * 7 / 8)


def test_logits_of_an_eager_loss_are_half_as_many_bytes_again() -> None:
    plain, eager = (sheet_of(replace(TORCHTITAN, logit_share=share)) for share in (1.0, EAGER_LOGITS))
    last = place_of(plain, "head")
    head = plain.context.shapes.blocks[last]
    more = eager.kept_bytes[0][0, last] - plain.kept_bytes[0][0, last]
    assert more == pytest.approx(0.5 * 4 * head.saved_fp32_elements)


@pytest.mark.parametrize(
    ("program", "notes", "each"),
    [("megatron-lm", "", 6), ("megatron-lm", "cross-entropy-loss-fusion=True; swiglu=True", 10),
     ("megatron-deepspeed", "", 10), ("nemo", "", 8)],
)  # fmt: skip
def test_a_loss_of_megatrons_holds_the_logits_that_its_code_makes(program: str, notes: str, each: int) -> None:
    """Of 2 x 4,096 tokens and a vocabulary of 32,000 over tp 2: 16 bits and fp32 in place are 6 B, a clone 10 B.

    Of one layer nothing else grows with the vocabulary.
    """
    row = {"tp": 2, "dp": 4, "zero_stage": "1", "program": program, "notes": notes, "layers": 1, "recompute": "none"}
    found = {}
    for vocab in (32_000, 320_000):
        case = case_of(**row, vocab=vocab)
        sheet = contexts_of([case], read_constants())[0][0].sheet(*case.plans)
        terms = {term.name: float(term.values[0]) for term in pricing.memory_components(sheet)}
        found[vocab] = terms["activations"] + terms["transients"]
    assert found[320_000] - found[32_000] == pytest.approx(each * 2 * 4096 * (320_000 - 32_000) / 2)


@pytest.mark.parametrize(
    ("changes", "held"),
    [({"zero_stage": "0", "cp": 4, "dp": 2}, lambda dense, experts: dense + experts),
     ({"zero_stage": "dist_opt", "cp": 4, "dp": 2}, lambda dense, experts: (dense + experts) / 8),
     ({"zero_stage": "0", "arch": "moe", "experts": 8, "topk": 2, "ep": 4}, lambda dense, experts: dense + experts / 4),
     ({"zero_stage": "dist_opt", "arch": "moe", "experts": 8, "topk": 2, "ep": 4},
      lambda dense, experts: (dense + experts) / 8)],
)  # fmt: skip
def test_plain_copies_hold_all_state_also_where_ranks_share_a_sequence_or_experts(
    changes: dict[str, object], held: Callable[[float, float], float]
) -> None:
    """Of Megatron-LM, 12 B for each parameter on eight devices; each of four has a quarter of the experts."""
    case = case_of(program="megatron-lm", micro_batch=1, **changes)
    sheet = contexts_of([case], read_constants())[0][0].sheet(case.plans[0])
    terms = {term.name: float(term.values[0]) for term in pricing.memory_components(sheet)}
    experts = sum(block.expert_parameters for block in case.profile.blocks)
    dense = case.profile.parameters - experts
    assert terms["optimizer state"] == pytest.approx(12 * held(dense, experts))
    whole = dense + experts / (changes.get("ep") or 1)
    assert terms["weights"] == pytest.approx(2 * whole) and terms["gradients"] == pytest.approx(4 * whole)
    update = float(optimizer_component(sheet).values[0])
    alone = sheet_of(MEGATRON, zero_stage="0")
    each = float(optimizer_component(alone).values[0]) / alone.context.profile.parameters
    assert update == pytest.approx(each * held(dense, experts))


def test_ranks_of_torchtitans_ring_exchange_keys_repeated_to_all_heads() -> None:
    """8 heads of keys for 32 of queries, width 128: 65,536 tokens over cp 4 on 4 devices, one sample, 32 layers.

    A gather makes 2 x 32 x 128 x 65,536 values of 2 B on each device, in forward, recompute and backward pass; the
    gradients are 4 B each.
    """
    row = {"kv_heads": 8, "seq_len": 65_536, "cp": 4, "dp": 1, "n_devices": 4, "micro_batch": 1, "global_batch": 1}
    row |= {"recompute": "full", "accelerator": "H100-80GB", "program": "torchtitan", "zero_stage": "fsdp2"}
    once, repeated = (sheet_of(software, **row) for software in (replace(TORCHTITAN, rings_repeated=False), TORCHTITAN))
    of_layer = 2 * 128 * 65_536
    for sheet, heads in ((once, 8), (repeated, 32)):
        gather, gradients = context_collectives(sheet)
        assert gather.buffer_bytes[0] == 32 * 3 * 2 * heads * of_layer
        assert gradients.buffer_bytes[0] == 32 * 4 * heads * of_layer


def test_gradients_of_keys_go_around_beside_the_next_keys_attention() -> None:
    """Of gathers as much shows as a rank's own attention is shorter, of gradients that go round the last of four.

    Attention here takes a hundred times what is exchanged, so all gathers are hidden, and three of four exchanges.
    """
    row = {"kv_heads": 8, "seq_len": 2**20, "cp": 4, "dp": 1, "n_devices": 4, "micro_batch": 1, "global_batch": 1}
    row |= {"recompute": "none", "accelerator": "H100-80GB", "program": "torchtitan", "zero_stage": "fsdp2"}
    sheet = sheet_of(TORCHTITAN, **row)
    terms = {term.name: float(term.values[0]) for term in pricing.time_components(sheet)}
    gradients = context_collectives(sheet)[1]
    whole = sheet.ring("cp").seconds("reduce_scatter", gradients.buffer_bytes, gradients.calls)[0]
    assert terms["attention"] > 100 * whole
    assert terms["context communication"] == pytest.approx(whole / 4)


def test_logits_of_maxtext_are_kept_in_bf16() -> None:
    """Two bytes for a logit in place of four; a 7B on eight chips of 32 GB, 6 x 8,192 tokens each, is not refused."""
    whole, half = sheet_of(replace(MAXTEXT, logit_share=1.0)), sheet_of(MAXTEXT)
    last = place_of(whole, "head")
    logits = whole.context.shapes.blocks[last].saved_fp32_elements
    assert whole.kept_bytes[0][0, last] - half.kept_bytes[0][0, last] == pytest.approx(2 * logits)
    changes = {"program": "maxtext", "accelerator": "TPU v6e", "seq_len": 8192, "ffn_hidden": 14336, "kv_heads": 8}
    changes |= {"micro_batch": 6, "global_batch": 48, "recompute": "", "zero_stage": "fsdp", "measured_step_s": 6.3}
    (found,) = price_cases([case_of(**changes, notes="activations are offloaded to host memory")])
    assert isinstance(found, Priced) and found.fits


def test_what_data_axes_wait_for_is_waited_for_as_other_links_are() -> None:
    parts = waiting_parts([("products", 7.0), ("sync", 1.5), ("sends", 0.5), ("host", 1.0)])
    assert parts == pytest.approx((0.2, 0.1))


def test_intervals_widen_with_what_no_table_had() -> None:
    seen = FittedOn(("ampere",), ("bf16",), ("Megatron-LM",), 64)
    constants = replace(read_constants(), time_80=0.2, time_95=0.4, seen=seen)
    known = time_widths(constants, "NVIDIA A100", "bf16", "Megatron-LM", 64)
    assert (known.narrow, known.wide, known.because) == (0.2, 0.4, "this chip and this program measured")
    chip = time_widths(constants, "NVIDIA H100", "bf16", "Megatron-LM", 64)
    assert (
        chip.narrow == pytest.approx(math.hypot(0.2, CHIP)) and chip.because == "this program measured, this chip never"
    )
    assert chip.wide == pytest.approx(math.hypot(0.4, CHIP * Z95 / Z80))
    other = time_widths(constants, "NVIDIA A100", "bf16", "Paceline", 256)  # two doublings beyond
    assert other.narrow == pytest.approx(math.hypot(0.2, PROGRAM, 0.04))
    unnamed = time_widths(constants, "NVIDIA A100", "bf16", "", 64)
    assert unnamed.narrow == pytest.approx(math.hypot(0.2, UNNAMED))
    assert unnamed.because == "this chip measured, this program never"
    mixture = time_widths(constants, "NVIDIA A100", "bf16", "Megatron-LM", 64, experts=True)
    assert mixture.narrow == pytest.approx(math.hypot(0.2, EXPERTS))
    assert mixture.because == "this chip and this program measured, how tokens spread over experts unknown"
    lone = replace(constants, seen=replace(seen, once=("ampere",)))
    once = time_widths(lone, "NVIDIA A100", "bf16", "Megatron-LM", 64)
    assert once.narrow == pytest.approx(math.hypot(0.2, CHIP * math.sqrt(0.5))), "one source is half of what is to know"
    assert once.because == "this program measured, this chip's generation by one source"
    assert time_widths(lone, "NVIDIA H100", "bf16", "Megatron-LM", 64) == chip
    assert held_widths((0.12, 0.3), constants, "Megatron-LM") == (0.12, 0.3)
    narrow, wide = held_widths((0.12, 0.3), constants, "")
    assert narrow == pytest.approx(math.hypot(0.12, HELD)) and wide == pytest.approx(math.hypot(0.3, HELD * Z95 / Z80))


def anchored_row(devices: int, measured: float, computes: float, waits: float) -> Scored:
    """Return a row of a series with the two terms of its forecast."""
    case = case_of(measured_step_s=measured, n_devices=devices, dp=devices, global_batch=64)
    terms = (TermSeconds("products", "products", computes), TermSeconds("tensor", "collectives", waits))
    total = computes + waits
    sure = math.exp(math.hypot(0.2 * Z80, COMMUNICATING * waits / total))  # a deviation of 0.2 beside what it waits for
    interval = Interval(total, total / sure, total * sure, total / sure**2, total * sure**2)
    return Scored(case, Priced(case.plans[0], interval, 0.0, True, terms))


def test_an_anchor_corrects_what_devices_compute_and_leaves_what_they_wait_for() -> None:
    rows = [anchored_row(8, 12.0, 8.0, 2.0), anchored_row(16, 7.25, 4.0, 2.0), anchored_row(32, 4.5, 2.0, 2.0)]
    own = (COMMUNICATING * 0.2 / Z80) ** 2 + ROWS**2  # a fifth of the anchor's step waits for links
    known = 0.2**2 / (0.2**2 + own)
    assert anchor_factor(rows[0]) == pytest.approx((10.0 / 8.0) ** known)
    assert anchored_seconds(rows[1], 1.25) == pytest.approx(7.0)
    (series,) = anchor_smallest(rows[::-1]).series
    assert (series.devices, series.rows, series.factor) == (8, 2, pytest.approx(1.25**known))
    found = [computes * 1.25**known + 2.0 for computes in (4.0, 2.0)]
    assert series.mape == pytest.approx((abs(found[0] / 7.25 - 1) + abs(found[1] / 4.5 - 1)) / 2)
    unsure = replace(rows[0].priced.step_seconds, high_80=10.0 * math.exp(0.36))
    of_an_unknown_chip = replace(rows[0], priced=replace(rows[0].priced, step_seconds=unsure))
    computing = (0.36**2 - (COMMUNICATING * 0.2) ** 2) / Z80**2
    assert trust(of_an_unknown_chip) == pytest.approx(computing / (computing + own))
    assert trust(of_an_unknown_chip) > known, "an interval that is wider for its chip trusts its anchor more"
    waits_most = anchored_row(8, 12.0, 2.0, 8.0)
    little = 0.2**2 / (0.2**2 + (COMMUNICATING * 0.8 / Z80) ** 2 + ROWS**2)
    assert anchor_factor(waits_most) == pytest.approx(1.2**little), "of what mostly waits, the whole step"
    assert trust(waits_most) < known, "and one that is wider for what its step waits for, less"


@pytest.mark.parametrize("program", ["pytorch-fsdp1", "pytorch-fsdp2", "olmo", "lingua", "torchtune"])
def test_fp8_of_pytorch_programs_casts_whole_tensors_as_torchao_does(program: str) -> None:
    # The first layer of a 7B: products of 4 x 4,096^2 and 3 x 4,096 x 11,008 weights and their widths; 6 bytes a value.
    case = case_of(program=program, precision="fp8", accelerator="H100-80GB")
    sheet = contexts_of([case], read_constants())[0][0].sheet(*case.plans)
    assert sheet.recipe == RECIPES["tensorwise"]
    assert sheet.cast_seconds[0, place_of(sheet, "decoder")] > 0


def test_a_module_under_deepspeeds_engine_alone_brings_no_fused_kernels() -> None:
    engine, layers = (
        software_of(case_of(program=name, zero_stage="3")) for name in ("deepspeed", "megatron-deepspeed")
    )
    assert (engine.fused, layers.fused) == (False, True)
    sheets = [sheet_of(software) for software in (engine, layers)]
    own, fused = (sheet.moving_seconds[0, place_of(sheet, "decoder")] for sheet in sheets)
    assert own / fused == pytest.approx(read_constants().unfused_moves)


def test_nemo_automodel_sends_a_token_once_to_a_device_and_needs_no_compiler_to_fuse() -> None:
    # Eight experts on eight devices, drawn one by one: a device gets a token with 1 - (7/8)^8.
    row = {"arch": "moe", "experts": 128, "topk": 8, "ep": 8, "accelerator": "H100-80GB"}
    once, each = (software_of(case_of(program=name, **row)) for name in ("nemo-automodel", "pytorch-fsdp2"))
    assert once.fused and not each.fused
    moved = [expert_collective(sheet_of(software, **row)).buffer_bytes[0] for software in (once, each)]
    assert moved[0] / moved[1] == pytest.approx(1 - (7 / 8) ** 8)
