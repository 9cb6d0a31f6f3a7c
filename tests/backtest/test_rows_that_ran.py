"""Rows that ran and were called too large: what their programs hold, by hand on shapes of published runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from backtest_examples import LLAMA, case_of, reason_of

from paceline.backtest.price import Priced, contexts_of, price_cases, software_of
from paceline.backtest.rows import Case
from paceline.backtest.schema import StepRow
from paceline.backtest.words.settings import modules_of
from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost import pricing
from paceline.plan.cost.collectives.within_passes import expert_passes, stream_collectives
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.model_parts import MODES
from paceline.plan.cost.programs.known import EAGER_LOGITS, FUSED_LOGITS
from paceline.plan.cost.sheet import Sheet
from paceline.spec.cluster import ClusterSpec
from paceline.spec.profile import BlockProfile

# MaxText's 16B on a v5e pod (its configs/v5e/16b.sh and README, read 2026-11-24): 6 sequences a chip, 120 TFLOP/s.
V5E = StepRow(
    source="a README", program="maxtext", model="maxtext-16b", arch="llama", layers=32, hidden=4096, ffn_hidden=28672,
    heads=64, kv_heads=64, head_dim=128, vocab=32000, seq_len=2048, accelerator="TPU v5e", n_devices=256,
    precision="bf16", tp=1, pp=1, cp=1, dp=256, zero_stage="fsdp", micro_batch=6, global_batch=1536, recompute="full",
    attention_kernel="flash", measured_step_s=10.3,
)  # fmt: skip
# Its 64B on 64 chips of v5p (configs/v5p/64b.sh): `remat_policy=minimal`, 3 sequences a chip, tensor ranks of four.
V5P = replace(
    V5E, model="maxtext-64b", layers=64, hidden=8192, accelerator="TPU v5p", n_devices=64, tp=4, dp=16, micro_batch=12,
    global_batch=192, recompute="selective", measured_step_s=7.4,
)  # fmt: skip
GIB = 2**30


def sheet_of(case: Case) -> Sheet:
    return contexts_of([case], read_constants())[0][0].sheet(*case.plans)


def held(case: Case) -> dict[str, float]:
    """Return the bytes of every term of the memory of a case's first plan."""
    return {column.name: float(column.values[0]) for column in pricing.memory_components(sheet_of(case))}


def priced(case: Case) -> Priced:
    (found,) = price_cases([case])
    assert isinstance(found, Priced), found
    return found


def test_xla_gathers_and_reduces_a_matrix_at_a_time() -> None:
    found, matrix = held(case_of(V5E)), 4096 * 32000  # the head; a matrix of the feed-forward has 4096 x 28672
    assert found["weight copies"] == 2 * 2 * matrix, "one in use and the next on its way, in bf16"
    assert found["communication buffers"] == 2 * 2 * matrix, "a gradient that is reduced, and the next one"
    whole = held(case_of(V5E, program="pytorch-fsdp2"))
    assert whole["weight copies"] > 4 * found["weight copies"], "FSDP2 gathers blocks"
    assert priced(case_of(V5E)).fits


def test_of_a_mixture_all_experts_of_a_layer_are_one_array_to_xla() -> None:
    row = replace(V5E, arch="moe", model="mixtral-8x7b", ffn_hidden=14336, experts=8, topk=2)
    assert held(case_of(row))["weight copies"] == 2 * 2 * 8 * 4096 * 14336
    assert held(case_of(row, ep=8))["weight copies"] == 2 * 2 * 4096 * 32000, "the head"


def test_xlas_minimal_policy_keeps_products_that_backward_reads_and_computes_attention_again() -> None:
    sheet, width, tokens = sheet_of(case_of(V5P)), 8192, 2048
    layer = next(place for place, block in enumerate(sheet.context.shapes.blocks) if block.kind == "decoder")
    # The block's input, queries, keys, values, attention's projection, and both products of the feed-forward.
    elements = tokens * (5 * width + 2 * 28672)
    assert sheet.kept_bytes[MODES.index("selective"), 0, layer] == pytest.approx(2 * elements / 4)
    # Attention's forward pass is one of the 3.5 that a step has of it: each of two products and 2.5 times as many.
    again = sheet.again_seconds[:, 0, layer] - sheet.moving_seconds[0, layer]
    assert again[MODES.index("selective")] == pytest.approx(sheet.attention_seconds[0, layer] / 3.5)
    torch = sheet_of(case_of(V5P, program="pytorch-fsdp2"))
    assert torch.again_seconds[MODES.index("selective"), 0, layer] == torch.moving_seconds[0, layer]
    assert priced(case_of(V5P)).fits


@pytest.mark.parametrize(("name", "free"), [("tpu-v5e", 15.75), ("tpu-v5p", 95.74), ("tpu-v6e", 31.25)])
def test_a_tpu_has_what_xla_says_it_has(name: str, free: float) -> None:
    device = resolve_cluster(ClusterSpec(device=name, devices=1))[0].device
    assert device.memory_bytes.value - device.runtime_bytes.value == pytest.approx(free * GIB, rel=0.02)
    assert resolve_cluster(ClusterSpec(device="a100-80", devices=1))[0].device.runtime_bytes.value == 1.5e9


def test_selective_of_fsdp1_is_full_recompute_of_some_blocks() -> None:
    # fms-fsdp's Llama 2 70B on 128 A100: all products kept are 80 x 2 x 4,096 x 14 x 8,192 x 2 B = 150e9 bytes.
    row = replace(
        LLAMA, program="pytorch-fsdp1", model="llama2-70b", layers=80, hidden=8192, ffn_hidden=28672, heads=64,
        kv_heads=8, n_devices=128, dp=128, global_batch=256, recompute="selective", measured_step_s=19.98,
    )  # fmt: skip
    case = case_of(row)
    assert {plan.recompute for plan in case.plans} == {"budget"}
    sheet = sheet_of(case)
    kinds = [sheet.modes_of(row).sum(axis=1) for row in range(len(case.plans))]
    assert all(counts[MODES.index("selective")] == 0 and counts.sum() == 80 for counts in kinds)
    assert np.all(np.diff([counts[MODES.index("full")] for counts in kinds]) < 0)
    found = priced(case)
    assert found.fits and found.step_seconds.value == pytest.approx(19.98, rel=0.10)


def test_where_nothing_fits_a_schedule_is_not_chosen_for_the_memory_it_spares() -> None:
    # Llama 3 405B on 8,192 H100 (arXiv:2407.21783, table 4), its schedule not stated. By what is counted no schedule
    # has room; 1F1B has the least, and a bubble of 15 / 32, where interleaving has 15 / 256.
    row = replace(
        LLAMA, program="", model="llama3-405b", layers=126, hidden=16384, ffn_hidden=53248, heads=128, kv_heads=8,
        vocab=128256, seq_len=8192, accelerator="H100", n_devices=8192, tp=8, pp=16, dp=64, zero_stage="2",
        micro_batch=None, global_batch=2048, measured_step_s=12.0,
    )  # fmt: skip
    found = priced(case_of(row))
    assert not found.fits and found.plan.schedule == "interleaved"
    assert found.step_seconds.value == pytest.approx(12.0, rel=0.10)


# Four stages of eight layers each, one micro-batch in flight on the last stage and four on the first.
STAGES = replace(
    LLAMA, program="megatron-lm", pp=4, pp_schedule="1f1b", dp=2, zero_stage="0", micro_batch=1, global_batch=16,
    measured_memory_gib=30.0, attention_kernel="flash",
)  # fmt: skip


def held_by(case: Case, rank: str) -> float:
    """Return the bytes of tensors on a pipeline rank of a case's first plan."""
    memory = pricing.memory_components(sheet_of(case), rank)
    return sum(float(column.values[0]) for column in memory if column.kind not in ("cache", "runtime"))


def test_memory_is_that_of_the_rank_which_writes_it_down() -> None:
    """Megatron-LM's log is of the last rank, Nanotron's of rank 0; what others say is of the fullest device.

    By hand: between the first and the last of four stages lie three micro-batches more in flight there, and here the
    head, whose weights are as many as the embedding's, with its logits.
    """
    logged = case_of(STAGES, notes="mem_max_allocated_bytes=32212254720")
    fullest, first, last = (held_by(logged, rank) for rank in ("fullest", "first", "last"))
    assert fullest == first > last
    activations = [
        next(float(column.values[0]) for column in pricing.memory_components(sheet_of(logged), rank)
             if column.name == "activations")
        for rank in ("first", "last")
    ]  # fmt: skip
    assert activations[0] > 3 * activations[1], "four micro-batches of eight layers, and one of eight and the head"
    workspaces = 2 * 8_519_680  # of cuBLAS: torch has allocated them, on every rank
    assert priced(logged).memory_bytes == last + workspaces
    said = case_of(STAGES, memory_kind="allocated")
    assert priced(said).memory_bytes == fullest + workspaces, "of a paper's figure nobody knows the rank"
    rank_0 = case_of(STAGES, program="nanotron", memory_kind="allocated")
    assert priced(rank_0).memory_bytes == held_by(rank_0, "first") + workspaces
    assert priced(logged).fits == priced(said).fits, "whether a plan fits is up to its fullest device"


def test_one_stage_holds_the_same_whoever_writes_it_down() -> None:
    alone = case_of(STAGES, pp=1, dp=8)
    assert held_by(alone, "first") == held_by(alone, "last") == held_by(alone, "fullest")


def test_reinforcement_learning_is_no_training_step() -> None:
    """What generates the samples holds memory and takes time beside it."""
    assert reason_of(notes="CI golden value, case gpt/gpt_grpo_tp8tp4_pp1") == "reinforcement learning"
    assert case_of(notes="happo is a name").step_seconds == 20.0


# Qwen3 30B by torchtitan on 8 H200 (blind round 8): 48 layers, 128 experts of 768, 8 of them a token.
TITAN = replace(
    LLAMA, program="torchtitan", model="qwen3-30b-a3b", arch="moe", layers=48, hidden=2048, ffn_hidden=768, heads=32,
    kv_heads=4, head_dim=128, vocab=151936, seq_len=8192, experts=128, topk=8, accelerator="H200-141GB", ep=8,
    zero_stage="fsdp2", micro_batch=6, global_batch=48, recompute="selective", attention_kernel="", compile=1,
)  # fmt: skip


def _routed(case: Case) -> BlockProfile:
    return next(block for block in case.profile.blocks if block.routed_elements)


def test_torchtitan_keeps_attention_and_every_other_product_of_a_mixture_but_nothing_of_its_experts() -> None:
    """Of a token: the stream, attention's output and log-sum-exp, half of queries, keys, values, output and router."""
    case = case_of(TITAN)
    stream, attention, half = 2048, 32 * 128 + 2 * 32, (32 * 128 + 2 * 4 * 128 + 2048 + 128) / 2
    assert _routed(case).selective_elements == 8192 * (stream + attention + half)
    other = _routed(case_of(TITAN, program="kempnerforge"))
    assert other.selective_elements > 8192 * 8 * 768 * 2, "whose policy is not known to leave grouped products out"


def test_what_torchtitan_computes_again_of_a_mixture_is_its_experts_and_half_of_the_rest() -> None:
    sheet = sheet_of(case_of(TITAN))
    at = next(place for place, block in enumerate(sheet.context.shapes.blocks) if block.routed_elements)
    block = sheet.context.shapes.blocks[at]
    kept = 0.5 * (1 - block.routed_flops / block.matmul_flops)
    again = float(sheet.moving_seconds[0, at] + (1 - kept) * sheet.product_seconds[0, at])
    assert float(sheet.again_seconds[MODES.index("selective"), 0, at]) == pytest.approx(again)
    assert 0.5 < 1 - kept < 1


def test_torchtitans_mixtures_are_younger_than_its_compiled_loss() -> None:
    assert software_of(case_of(TITAN)).logit_share == FUSED_LOGITS
    for older in ({"compile": 0}, {"arch": "llama", "experts": None, "topk": None, "ep": 1}):
        assert software_of(case_of(TITAN, **older)).logit_share == EAGER_LOGITS


@pytest.mark.parametrize(
    ("program", "status", "modes"),
    [("megatron-lm", "oom", {"none"}), ("deepspeed", "oom", {"none"}), ("torchtitan", "oom", None),
     ("megatron-lm", "ok", None)],
)  # fmt: skip
def test_a_row_out_of_memory_is_not_taken_to_have_run_what_fits(program: str, status: str, modes: set | None) -> None:
    row = {"program": program, "recompute": "", "status": status, "measured_step_s": None, "measured_memory_gib": None}
    if status == "ok":
        row["measured_step_s"] = 20.0
    case = case_of(zero_stage="2" if program == "deepspeed" else "", **row)
    assert {plan.recompute for plan in case.plans} == (modes or {"none", "selective", "full", "budget"})


@pytest.mark.parametrize(
    ("program", "kernel", "is_fused"),
    [("transformers", "", False), ("mine", "", True), ("transformers", "sdpa flash", True)],
)
def test_encoders_of_transformers_write_their_scores(program: str, kernel: str, is_fused: bool) -> None:
    """`EsmSelfAttention` of 2024: what eight heads' scores and their softmax keep is in no other term."""
    row = {"program": program, "arch": "encoder", "zero_stage": "0", "attention_kernel": kernel}
    blocks = [block for block in case_of(**row).profile.blocks if block.recomputable]
    assert all(bool(block.fused_attention) is is_fused for block in blocks)


def test_selective_recompute_of_attentions_core_repeats_no_collective() -> None:
    """Korthikanti et al. 2022, section 5: what is repeated lies between a gather and a reduce-scatter."""
    row = {"program": "megatron-lm", "zero_stage": "0", "tp": 8, "dp": 1, "micro_batch": 4, "global_batch": 4}
    calls = {}
    for mode in ("none", "selective", "full"):
        gathers, sums = stream_collectives(sheet_of(case_of(recompute=mode, **row)))
        calls[mode] = (float(gathers.calls[0]), float(sums.calls[0]))
    assert calls["selective"] == calls["none"]
    assert calls["full"] == tuple(number + 2 * 32 for number in calls["none"]), "two of each in 32 layers again"


def test_selective_recompute_of_named_modules_keeps_what_products_and_attention_give() -> None:
    """Megatron-LM's "layernorm, moe_act": of a token the stream, attention's output, and the outputs of products."""
    row = {"program": "megatron-core", "zero_stage": "dist_opt", "attention_kernel": ""}
    block = case_of(recompute="layernorm, mlp_act", **row).profile.blocks[1]
    products = 3 * 4096 + 2 * 11008 + 2 * 4096  # queries, keys and values; gate and up; attention's output and down
    assert block.selective_elements == 4096 * (4096 + 4096 + 2 * 32 + products)
    passes = {}
    for words in ("norm, act", "layernorm moe", "selective", "core_attn layernorm"):
        case = case_of(TITAN, program="megatron-core", zero_stage="dist_opt", compile=0, recompute=words)
        passes[words] = float(expert_passes(sheet_of(case))[0])
    assert passes == {"norm, act": 4.0, "layernorm moe": 6.0, "selective": 4.0, "core_attn layernorm": 4.0}
    assert software_of(case_of(TITAN, program="torchtitan", recompute="norm, act")).selective_routes, "its own policy"


def test_recompute_by_modules_is_read_where_all_words_name_one() -> None:
    assert modules_of("norm, act") == ("norms", "activations") and modules_of("layernorm moe_act") == modules_of(
        "norm act"
    )
    assert modules_of("layernorm, moe") == ("norms", "experts") and modules_of("core_attn") == ("core",)
    assert not any(
        modules_of(word) for word in ("", "selective", "full", "none", "save_dot_except_mlp", "1 of 2", "mlp of 2")
    )


def test_megatron_that_sends_by_deepep_attends_by_cudnn() -> None:
    """DeepEP is of 2025, when Transformer Engine takes cuDNN's attention on Hopper unless it is told otherwise."""
    row = {"program": "megatron-core", "zero_stage": "dist_opt", "compile": 0}
    for notes, kernel, is_cudnn in (("DeepEP", "", True), ("HybridEP; dropless", "", True), ("", "", False),
                                    ("without DeepEP", "", False), ("DeepEP", "flash 2", False)):  # fmt: skip
        assert software_of(case_of(TITAN, notes=notes, attention_kernel=kernel, **row)).cudnn_attention is is_cudnn
    assert not software_of(case_of(TITAN, notes="DeepEP")).cudnn_attention, "torchtitan has other attention"


def test_a_note_of_whole_experts_spreads_them_over_tensor_ranks() -> None:
    row = {"program": "megatron-core", "zero_stage": "dist_opt", "compile": 0, "tp": 2, "dp": 4, "ep": 4}
    plain, whole = (case_of(TITAN, notes=notes, **row) for notes in ("", "DeepEP; ETP=1"))
    assert {plan.layout.ep for plan in plain.plans} == {4} and not software_of(plain).spreads_experts
    assert {plan.layout.ep for plan in whole.plans} == {2} and software_of(whole).spreads_experts, (
        "of four ranks tp has 2"
    )
    assert not software_of(case_of(TITAN, notes="ETP=2", **row)).spreads_experts


def test_torchtitans_experts_borrow_tensor_ranks_and_are_whole_there() -> None:
    row = replace(
        LLAMA, program="torchtitan", arch="moe", model="mixtral-8x7b", ffn_hidden=14336, experts=8, topk=2, tp=4, dp=4,
        n_devices=16, zero_stage="fsdp3", ep=8,
    )  # fmt: skip
    eight, two = (software_of(case_of(row, ep=size)) for size in (8, 2))
    assert eight.spreads_experts and not eight.routes_whole, "ep 8 is of 4 tensor ranks and 2 shards"
    assert not two.spreads_experts and two.routes_whole, "every tensor rank has a quarter of each expert"
