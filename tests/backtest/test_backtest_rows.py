"""Rows become the model, cluster and plans that they describe, or say why they cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from backtest_examples import LLAMA, case_of, reason_of

from paceline.backtest.layout import stages_of
from paceline.backtest.machine import Machines, rate_of
from paceline.backtest.price import Priced, price_cases
from paceline.backtest.schema import StepRow
from paceline.backtest.shape import shape_of
from paceline.spec.layout import Layout


@pytest.mark.parametrize(
    ("zero", "layout", "stage"),
    [("0", Layout(dp_replicate=8), 3),
     ("1", Layout(dp_shard=8), 1),
     ("dist_opt", Layout(dp_shard=8), 1),
     ("1 (dist_opt)", Layout(dp_shard=8), 1),
     ("2", Layout(dp_shard=8), 2),
     ("3", Layout(dp_shard=8), 3),
     ("fsdp3", Layout(dp_shard=8), 3),
     ("megatron_fsdp:optim_grads_params", Layout(dp_shard=8), 3),
     ("1(group 4)", Layout(dp_replicate=2, dp_shard=4), 1)],
)  # fmt: skip
def test_data_parallelism_of_other_frameworks(zero: str, layout: Layout, stage: int) -> None:
    (plan,) = case_of(zero_stage=zero).plans
    assert (plan.layout, plan.zero) == (layout, stage)


def test_hsdp_shards_inside_nodes_or_over_several_where_a_model_does_not_fit() -> None:
    row: dict[str, Any] = {"zero_stage": "hsdp", "n_devices": 32, "dp": 32, "recompute": "full"}
    small = case_of(**row)
    assert [(plan.layout, plan.zero) for plan in small.plans] == [
        (Layout(dp_replicate=4, dp_shard=8), 3), (Layout(dp_replicate=2, dp_shard=16), 3),
    ]  # fmt: skip
    assert "devices of a group of shards: the best that fit" in small.marks
    assert [plan.layout for plan in case_of(**{**row, "n_devices": 8, "dp": 8}).plans] == [Layout(dp_shard=8)]
    # 34e9 parameters of 16 bytes of state are 68 GB over eight, and half of that over sixteen.
    large = case_of(**row, layers=48, hidden=8192, ffn_hidden=22016, heads=64, kv_heads=8)
    (priced,) = price_cases([large])
    assert isinstance(priced, Priced) and priced.plan.layout == Layout(dp_replicate=2, dp_shard=16) and priced.fits


def test_model_axes_schedule_and_accumulation() -> None:
    (plan,) = case_of(
        n_devices=64, tp=4, sp=1, pp=2, cp=2, dp=4, pp_schedule="interleaved_1f1b", vpp=4, zero_stage="1", micro_batch=2
    ).plans
    assert plan.layout == Layout(dp_shard=4, cp=2, tp=4, pp=2)
    assert (plan.schedule, plan.virtual_stages, plan.accumulation, plan.stages) == ("interleaved", 4, 8, (4,) * 8)


def test_layers_are_dealt_out_evenly_where_they_can_be() -> None:
    profile = case_of().profile
    assert stages_of(False, profile, 4) == (8, 8, 8, 8)
    assert sum(stages_of(False, profile, 3)) == 32
    large_head = case_of(vocab=512_000).profile
    assert stages_of(False, large_head, 4) == (8, 8, 8, 8)
    assert stages_of(True, large_head, 4)[-1] < 8  # by cost
    assert stages_of(False, profile, 33) == ()


def test_what_a_row_leaves_open_is_open_and_marked() -> None:
    case = case_of(micro_batch=None, recompute="")
    assert {plan.recompute for plan in case.plans} == {"none", "selective", "budget", "full"}
    assert {plan.micro_batch for plan in case.plans} == {1, 2, 4, 8}
    assert all(plan.accumulation * plan.micro_batch == 8 for plan in case.plans)
    assert {"recompute: the best that fits", "micro-batch: the best that fits"} <= set(case.marks)


def test_a_batch_that_is_not_stated_is_made_of_its_parts_or_assumed() -> None:
    assert case_of(global_batch=None, grad_accum=3).batch_samples == 2 * 3 * 8
    case = case_of(global_batch=None)
    assert case.batch_samples * 4096 == 2**20
    assert "global batch of 1,048,576 tokens assumed" in case.marks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"status": "suspect"}, "status suspect"),
     ({"status": "includes_eval"}, "status includes_eval"),
     ({"problem": "tp = 'x' is not a whole number"}, "unreadable: tp = 'x' is not a whole number"),
     ({"notes": "Finetuning with Adapter on 1 GPU"}, "adapter fine-tuning"),
     ({"notes": "quantization bnb.nf4"}, "adapter fine-tuning"),
     ({"notes": "LoRA, weights in int8"}, "adapters beside weights in other bits than four"),
     ({"notes": "LoRA of all linear layers", "experts": 8, "topk": 2}, "adapters of experts"),
     ({"hidden": None}, "the model's shape is not stated"),
     ({"arch": "diffusion"}, "arch diffusion has no profile here"),
     ({"seq_len": None}, "the sequence length is not stated"),
     ({"n_devices": None}, "the number of devices is not stated"),
     ({"accelerator": "X1"}, "accelerator X1 is not in the catalog"),
     ({"dp": 4}, "the layout's degrees do not multiply to the devices"),
     ({"tp": None, "pp": None, "dp": None, "zero_stage": ""}, "no layout is stated"),
     ({"pp": 64, "n_devices": 64, "dp": 1}, "fewer layers than pipeline stages"),
     ({"recompute": "mixed: 5 of 12"}, "recompute of some layers only"),
     ({"measured_step_s": None}, "no time is stated"),
     ({"measured_step_s": None, "measured_tflops_per_device": 100.0}, "the FLOP convention is not stated"),
     ({"notes": "use for memory only"}, "memory only, as the notes say")],
)  # fmt: skip
def test_rows_that_cannot_be_scored_say_why(changes: dict[str, object], reason: str) -> None:
    assert reason_of(**changes) == reason


def test_an_adapter_of_a_network_is_none_of_weights() -> None:
    notes = "NCCL over sockets of one adapter (NCCL_SOCKET_IFNAME=hsn0); 8 adapters of 400 Gb/s in a node"
    assert case_of(notes=notes).step_seconds is not None


def test_time_is_read_from_whatever_the_table_states() -> None:
    direct = case_of()
    tokens = 64 * 4096
    rate = tokens / (20.0 * 8)
    assert case_of(measured_step_s=None, measured_tokens_per_s_per_device=rate).step_seconds == pytest.approx(20.0)
    # 6 N + 12 L h s per token, from the counts that the row itself implies.
    flops = tokens * (6 * direct.profile.parameters + 12 * 32 * 4096 * 4096)
    stated = {"measured_step_s": None, "tflops_convention": "6n"}
    by_rate = case_of(**stated, measured_tflops_per_device=flops / (20.0 * 8) / 1e12)
    assert by_rate.step_seconds == pytest.approx(20.0)
    assert case_of(**stated, measured_mfu=flops / (20.0 * 8) / 312e12).step_seconds == pytest.approx(20.0)
    assert "time from FLOPs (6n)" in by_rate.marks


def test_failed_and_out_of_memory_rows_are_cases_without_a_time() -> None:
    for status in ("oom", "failed"):
        case = case_of(status=status, measured_step_s=None)
        assert (case.step_seconds, case.memory_bytes, case.time_excluded) == (None, None, status)


@pytest.mark.parametrize(
    ("parameters", "tied"), [(1_342_177_280, True), (1_342_177_280 + 131_072 * 2048, False)]
)  # fmt: skip
def test_the_number_of_parameters_tells_whether_the_head_is_tied(parameters: int, tied: bool) -> None:
    row = replace(LLAMA, layers=16, hidden=2048, ffn_hidden=8192, vocab=131_072, n_params=parameters)
    shape, marks = shape_of(row)
    assert shape is not None and shape.tied is tied
    assert not any("parameters" in mark for mark in marks)
    _, marks = shape_of(replace(row, n_params=3 * parameters))
    assert any("of the parameters stated" in mark for mark in marks)


@pytest.mark.parametrize(
    ("arch", "causal", "gated"), [("mistral", True, True), ("BERT", False, False), ("opt", True, False)]
)
def test_families_are_known_under_the_names_of_their_like(arch: str, causal: bool, gated: bool) -> None:
    shape, _ = shape_of(replace(LLAMA, arch=arch))
    assert shape is not None and (shape.causal, shape.gated) == (causal, gated)


def test_a_vocabulary_that_is_not_stated_is_padded_as_for_its_tensor_ranks() -> None:
    row = StepRow(model="gpt", arch="gpt", layers=2, hidden=512, seq_len=1024, tp=8)
    shape, marks = shape_of(row)
    assert shape is not None and shape.vocab == 51_200  # as in the tables of Narayanan et al. 2021
    assert "vocabulary of 51,200 assumed (GPT-2's, padded)" in marks


@pytest.mark.parametrize(
    ("name", "entry"),
    [("A100-80GB", "a100-80"), ("A100-40GB", "a100-40"), ("H100-80GB", "h100-sxm"), ("a100-40", "a100-40"),
     ("NVIDIA H100-SXM5-80GB", "h100-sxm"), ("NVIDIA Blackwell GPU (B200-SXM-180GB)", "b200"), ("4090", "rtx-4090"),
     ("A100 (not stated in file)", "a100-80"), ("L4-24GB", "l4"), ("MI300X", "mi300x"),
     ("A800-80GB", "a800"), ("A30", None), ("dev", None), ("TPUv4", "tpu-v4"),
     ("TPU v5 lite", "tpu-v5e"), ("RTX4090", "rtx-4090"), ("Trainium", "trn1"), ("Trainium2", "trn2"),
     ("TPU7x", "tpu-v7x"),
     ("NVIDIA RTX 6000 Ada", "rtx-6000-ada"), ("RTX PRO 6000", "rtx-pro-6000"), ("RTX 5090", "rtx-5090"),
     ("A10G", "a10g"),
     ("Intel Max 1550", "max-1550"), ("H100 80GB HBM3", "h100-sxm"), ("Gaudi2", "gaudi2"),
     ("A100-PCIE-40GB", "a100-pcie-40"), ("TPU-v4", "tpu-v4"), ("Trillium", "tpu-v6e")],
)  # fmt: skip
def test_accelerators_are_found_under_the_names_that_tables_use(name: str, entry: str | None) -> None:
    found, _ = Machines().entry(name)
    assert (found.name if found else None) == entry


@pytest.mark.parametrize(
    ("text", "rate"),
    [("8x200Gbps HDR IB/node", 25e9), ("1600Gbps RoCE/node", 25e9), ("4 x 100 Gb/s", 6.25e9), ("3.2Tbps", 50e9),
     ("50 GB/s", 6.25e9), ("200Gbps RoCE/GPU", 25e9), ("400Gb/s per GPU", 50e9), ("EFA", None), ("", None)],
)  # fmt: skip
def test_network_rates_are_read_from_text(text: str, rate: float | None) -> None:
    assert rate_of(text, 8) == rate


def test_a_stated_network_replaces_the_catalogs() -> None:
    case = case_of(n_devices=16, dp=16, inter_bw="4x100Gbps RoCE/node")
    assert case.cluster.links[-1].bytes_per_second.value == 50e9 / 8
    assert case.cluster.links[-1].bytes_per_second.source == "published", "what adapters are sold as"
    measured = case_of(n_devices=16, dp=16, inter_bw="2.35GB/s/node measured by an all-reduce").cluster.links[-1]
    assert measured.bytes_per_second.source == "measured" and measured.bytes_per_second.value == 2.35e9 / 8
    assert case_of(n_devices=2, dp=2, intra_bw="PCIe").cluster.links[0].bytes_per_second.value == 32e9
