"""What DeepSpeed holds and rests on the host, and groups of experts that a row leaves open: by hand, of real rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from backtest_examples import LLAMA, case_of

from paceline.backtest.price import Priced, contexts_of, price_cases
from paceline.backtest.rows import Case
from paceline.backtest.schema import StepRow
from paceline.plan.cost import pricing
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.memory.offload import host_link
from paceline.plan.cost.memory.usable import needed, usable_bytes

# BLOOM's trials of layouts on 384 A100 of 80 GB (bigscience, chronicles-prequel.md, "Rebalancing layers").
BLOOM = StepRow(
    source="a diary", program="megatron-deepspeed", model="gpt-184B", arch="gpt", layers=100, hidden=12288, heads=64,
    vocab=250880, seq_len=2048, accelerator="A100-80GB", n_devices=384, devices_per_node=8, precision="bf16", tp=4,
    sp=0, pp=6, pp_schedule="1f1b", vpp=1, cp=1, ep=1, dp=16, zero_stage="1", micro_batch=1, global_batch=2048,
    recompute="full", attention_kernel="fused softmax (no flash)", measured_step_s=100.0,
)  # fmt: skip
# Two trillion parameters in ZeRO-3 on 1,024 A100 (DeepSpeed's post of 2022-07-26), which ran.
TWO_TRILLION = replace(
    BLOOM, model="gpt-2T", layers=160, hidden=32768, heads=256, vocab=50257, seq_len=1024, n_devices=1024, tp=1, pp=1,
    pp_schedule="", vpp=None, dp=1024, precision="fp16", zero_stage="3", micro_batch=8, global_batch=8192,
    measured_step_s=500.0,
    notes="activations and optimizer states are offloaded to host memory (per-row settings not printed)",
)  # fmt: skip


def held(case: Case) -> dict[str, float]:
    """Return the bytes of every term of the memory of a case's first plan."""
    sheet = contexts_of([case], read_constants())[0][0].sheet(case.plans[0])
    return {column.name: float(column.values[0]) for column in pricing.memory_components(sheet)}


def priced(case: Case) -> Priced:
    (found,) = price_cases([case])
    assert isinstance(found, Priced), found
    return found


def test_in_bf16_gradients_of_a_backward_pass_lie_beside_their_sums_in_fp32() -> None:
    # 100 layers over 6 stages: 17 on the fullest, the embedding on the first.
    parameters = 33_913_663_488 / 4
    assert held(case_of(BLOOM))["gradients"] == (4 + 2) * parameters, "DeepSpeed's BF16_Optimizer"
    assert held(case_of(BLOOM, program="megatron-lm"))["gradients"] == 4 * parameters, "one after the other"
    assert held(case_of(BLOOM, precision="fp16"))["gradients"] == 2 * parameters, "added up where they are"


def test_in_fp16_an_update_makes_gradients_flat_and_casts_them() -> None:
    """A sixteenth of 33.9e9 / 4 parameters: 2 B flat and 4 B cast, in blocks of their own, and 5e8 values reduced.

    Of a single copy all are flat at once, more than its passes have left free.
    """
    parameters = 33_913_663_488 / 4
    fp16, other = (held(case_of(BLOOM, precision="fp16", program=name)) for name in ("megatron-deepspeed", "megatron"))
    assert "flat gradients" not in other and fp16.get("flat gradients", 0.0) == 0, "whole gradients leave more free"
    assert fp16["allocator buffers"] - 6 * parameters / 16 == pytest.approx(
        (other["allocator buffers"]) * (1 + 1e9 / sum_of_loose(other)))  # fmt: skip
    assert fp16["communication buffers"] - other["communication buffers"] == 2 * 5e8
    alone = held(case_of(BLOOM, precision="fp16", n_devices=24, dp=1, measured_step_s=1600.0))
    idle = alone["activations"] + alone["transients"]
    assert alone["flat gradients"] == pytest.approx(6 * parameters - idle) and idle < 6 * parameters
    assert "flat gradients" not in held(case_of(BLOOM)), "BF16_Optimizer sums in fp32 as it goes"


def sum_of_loose(terms: dict[str, float]) -> float:
    """Return the bytes that the allocator keeps a share of: all but the optimizer's state, the runtime and its own."""
    return sum(terms.values()) - terms["optimizer state"] - terms["runtime"] - terms["allocator buffers"]


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_so_a_row_that_ran_out_of_memory_does_not_fit(micro_batch: int) -> None:
    row = replace(BLOOM, status="oom", measured_step_s=None, micro_batch=micro_batch)
    assert not priced(case_of(row)).fits
    assert priced(case_of(row, program="megatron-lm")).fits
    assert priced(case_of(BLOOM, tp=8, dp=8, micro_batch=micro_batch)).fits, "eight tensor ranks ran"


def test_zero_3_gathers_a_module_at_a_time_and_ahead_up_to_its_limit() -> None:
    # The largest weight is 4 x 32,768^2 = 4.3e9 values, more than the 1e9 that may be live. Two blocks of 12 x 32,768^2
    # values and the embedding would be 55e9 bytes.
    assert held(case_of(TWO_TRILLION))["weight copies"] == 2 * 4 * 32768**2
    assert held(case_of(TWO_TRILLION, program="pytorch-fsdp1"))["weight copies"] > 50e9
    small = case_of(LLAMA, program="deepspeed", zero_stage="3")
    assert held(small)["weight copies"] == 2 * 1e9, "of a block of 0.2e9 several, up to the limit"


def test_what_a_source_says_is_offloaded_is_left_open_row_by_row() -> None:
    case = case_of(TWO_TRILLION)
    assert {plan.offload for plan in case.plans} == {"none", "optimizer", "activations", "all"}
    assert "offload: the best that fits" in case.marks
    # Of 160 layers' inputs 8 x 1,024 x 32,768 x 2 bytes each: 86e9, more than the device has, rest on the host.
    found = priced(case)
    assert found.fits and found.plan.offload in ("activations", "all")
    assert not priced(case_of(TWO_TRILLION, notes="")).fits


@pytest.mark.parametrize(
    ("notes", "ways"),
    [
        ("optimizer states are offloaded", {"optimizer"}),
        ("optimizer states are offloaded (not printed of which rows)", {"none", "optimizer"}),
        ("activations and optimizer states are offloaded", {"optimizer", "all"}),
        ("activations are offloaded to the host", {"none", "activations"}),
        ("nothing is said; rows that offload are left out", {"none"}),
        ("no weights are offloaded", {"none"}),
        ("no optimizer states are offloaded", {"none"}),
        ("no activations and optimizer states are offloaded", {"none"}),
        ("no optimizer states are offloaded; activations are offloaded", {"none", "activations"}),
    ],
)
def test_only_what_is_named_may_rest_on_the_host(notes: str, ways: set[str]) -> None:
    assert {plan.offload for plan in case_of(replace(TWO_TRILLION, notes=notes)).plans} == ways


def test_a_row_that_fits_is_priced_without_the_host_unless_it_says_that_it_used_it() -> None:
    """A Llama of 8B whose Adam ran on the host was told to take 1.3 s of 3.0, and 7 GiB too much."""
    row = replace(LLAMA, program="deepspeed", zero_stage="3", notes="optimizer states are offloaded")
    table = replace(row, notes="text says that optimizer states are offloaded")
    on_host, on_device = priced(case_of(row)), priced(case_of(table))
    assert (on_host.plan.offload, on_device.plan.offload) == ("optimizer", "none")
    assert on_host.step_seconds.value > on_device.step_seconds.value
    assert on_host.memory_bytes < on_device.memory_bytes


def test_an_allocator_keeps_no_more_than_the_device_has() -> None:
    # 206B parameters on the same machine: with 20 % for each of log2(4) + log2(12) doublings, more than all of some 50
    # GiB would be kept beside 60, of 80 that there are.
    case = case_of(BLOOM, layers=82, hidden=14336, pp=12, dp=8, micro_batch=2)
    context = contexts_of([case], replace(read_constants(), allocator_share=0.2))[0][0]
    sheet = context.sheet(*case.plans)
    columns, memory = pricing.memory_components(sheet), context.cluster.device.memory_bytes.value
    assert pricing.total(columns)[0] == pytest.approx(memory)
    assert needed(sheet, columns)[0] < usable_bytes(context.cluster)


def test_groups_of_experts_that_a_row_does_not_state_are_open() -> None:
    # GPT-OSS 120B on 64 H100 (NeMo Automodel's performance summary): a step of 4.3 s, no group printed. Without one,
    # every device would receive 117e9 weights of two bytes in both passes of four micro-batches: 37 s at 50 GB/s.
    row = replace(
        LLAMA, program="nemo-automodel", model="gpt-oss-120b", arch="moe", layers=36, hidden=2880, ffn_hidden=2880,
        heads=64, kv_heads=8, vocab=201088, experts=128, topk=4, accelerator="H100-80GB", n_devices=64, dp=64,
        zero_stage="fsdp", global_batch=512, recompute="", attention_kernel="", measured_step_s=4.30,
    )  # fmt: skip
    case = case_of(row)
    assert {plan.layout.ep for plan in case.plans} == {1, 2, 4, 8, 16, 32, 64}
    assert "groups of experts: the best that fit" in case.marks
    found = priced(case)
    assert found.fits and found.plan.layout.ep > 8
    assert {plan.layout.ep for plan in case_of(replace(row, ep=8)).plans} == {8}


def test_fsdp_of_megatron_bridge_may_rest_activations_on_the_host_and_of_grace_that_takes_no_time() -> None:
    """70B in fp8 on 64 GB200 keeps 2 x 8,192 tokens of 80 layers: too much for the device, so they rest or are dropped.

    Over half of NVLink-C2C they are back before they are asked for; over PCIe they would not be.
    """
    row = StepRow(
        source="a table", program="megatron-bridge", model="llama3-70b", arch="llama", layers=80, hidden=8192,
        ffn_hidden=28672, heads=64, kv_heads=8, vocab=128256, seq_len=8192, accelerator="GB200", n_devices=64,
        devices_per_node=4, precision="fp8", tp=1, pp=1, cp=1, dp=64, zero_stage="fsdp", micro_batch=2,
        global_batch=256, measured_step_s=8.0,
    )  # fmt: skip
    case = case_of(row)
    assert {plan.offload for plan in case.plans} == {"none", "activations"}
    assert "offload: the best that fits" in case.marks
    found = priced(case)
    assert (found.plan.offload, found.plan.recompute) == ("activations", "none")
    assert all(term.seconds == 0 for term in found.terms if term.name == "activation offload")
    other = priced(case_of(row, accelerator="B200", devices_per_node=8))
    assert other.plan.offload == "none" and other.plan.recompute != "none"
    for changes in ({"zero_stage": "1"}, {"program": "nemo"}):
        assert {plan.offload for plan in case_of(replace(row, **changes)).plans} == {"none"}, changes


@pytest.mark.parametrize(
    ("device", "rate"),
    [("NVIDIA GB200 NVL72, one GPU, 186GB", 180e9), ("NVIDIA GB300 NVL72, one GPU, 279GB", 180e9),
     ("NVIDIA GH200 Grace Hopper, 96GB", 360e9), ("NVIDIA B200 SXM 180GB", 25e9)],
)  # fmt: skip
def test_a_grace_hosts_memory_is_reached_over_c2c(device: str, rate: float) -> None:
    """Four fifths of 900 GB/s, half in each direction, and half of that where two chips share it."""
    assert host_link(device).value == rate and rate in (0.8 * 900e9 / 4, 0.8 * 900e9 / 2, 25e9)
