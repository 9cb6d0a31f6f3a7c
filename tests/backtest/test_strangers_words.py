"""Tables of strangers: their words for machines, precisions, shards and programs, their units, and what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backtest_examples import LLAMA, case_of, cells_of, reason_of, write_table

from paceline.backtest.backtest import run_backtest
from paceline.backtest.layout import spreads_experts
from paceline.backtest.machine import Machines
from paceline.backtest.price import Priced, price_cases, software_of
from paceline.backtest.shape import shape_of
from paceline.backtest.words.adapters import adapter_of
from paceline.backtest.words.settings import part_kept, precision_of, recompute_of, sharding_of
from paceline.plan.cost import pricing
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.programs.known import EAGER_LOGITS, program_of
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.compute import host_starts, launch_component, optimizer_component

EIGHT = replace(
    LLAMA, model="llama3-8b", ffn_hidden=14336, kv_heads=8, vocab=128256, seq_len=8192, accelerator="H100-80GB",
    micro_batch=1, measured_step_s=6.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("word", "precision"),
    [
        ("fp8_hybrid", "fp8"), ("mxfp8", "fp8"), ("te_fp8", "fp8"), ("float8_rowwise", "fp8"), ("e4m3", "fp8"),
        ("bf16 with fp8", "fp8"), ("nvfp4", "fp4"), ("fp4_e2m1", "fp4"), ("bfloat16", "bf16"), ("amp_bf16", "bf16"),
        ("float16", "fp16"), ("16-mixed", "fp16"), ("float32", "fp32"), ("32-true", "fp32"), ("", "bf16"),
        ("amp", "bf16"),
    ],
)  # fmt: skip
def test_precisions_in_other_words(word: str, precision: str) -> None:
    assert precision_of(word, []) == (precision, "")


@pytest.mark.parametrize("word", ["int8", "aqt_int8", "tf32", "nf4", "x", "128x128"])
def test_a_precision_of_no_plan_is_no_bf16(word: str) -> None:
    assert word in reason_of(precision=word)


def test_a_chip_without_bf16_ran_in_fp16_where_nothing_is_said() -> None:
    changes = {"accelerator": "V100-SXM2-32GB", "micro_batch": None, "measured_step_s": 40.0}
    assert case_of(EIGHT, precision="", **changes).plans[0].precision == "fp16"


def test_a_memory_that_a_name_states_is_that_of_its_entry_or_is_told() -> None:
    machines = Machines()
    small, mark = machines.entry("V100-SXM2-16GB")
    assert small is not None and (small.name, mark) == ("v100-sxm2-16", "") and small.memory_bytes == 16.94e9
    assert not any(" GB" in machines.entry(name)[1] for name in ("V100-SXM2-32GB", "H100-80GB", "A100-40GB"))
    other, mark = machines.entry("A100-SXM4-64GB")
    assert other is not None and "of 85 GB" in mark, "a kind that the catalog has with other memory"


NOTES = [
    ("weights and moments in bf16", (2, 2)), ("x; weights and optimizer states are in 16 bits; y", (2, 2)),
    ("optimizer states in bf16", (0, 2)), ("moments rest in fp16", (0, 2)), ("weights in bf16", (0, 0)),
    ("of NVFP4 the last blocks are in bf16", (0, 0)), ("", (0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("notes", "narrow"), NOTES)
def test_a_note_of_what_rests_in_16_bits(notes: str, narrow: tuple[int, int]) -> None:
    found = software_of(case_of(program="pytorch-fsdp2", notes=notes))
    assert (found.weight_bytes, found.moment_bytes) == narrow
    assert (found.gradient_bytes, found.reduce_bytes) == ((2, 2) if narrow[0] else (4, 4))


@pytest.mark.parametrize(("program", "wide"), [("pytorch-ddp", 16 + 2), ("megatron-lm", 18)])
def test_a_weight_that_rests_in_16_bits_takes_eight_bytes_and_half_an_update(program: str, wide: int) -> None:
    """Weight, gradient and two moments of 2 bytes; AdamW moves 7 values of 2 bytes and clipping 3, of 4 else."""
    row = {"program": program, "n_devices": 1, "dp": 1, "zero_stage": "", "global_batch": 2, "compile": 1}
    held, seconds = [], []
    for notes in ("", "optimizer states in bf16", "weights and moments in bf16"):
        case = case_of(notes=notes, **row)
        context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software_of(case))
        sheet = context.sheet(case.plans[0])
        kinds = ("weights", "gradients", "optimizer")
        parts = [*pricing.memory_components(sheet)]
        kept = sum(part.values[0] for part in parts if part.kind in kinds)
        cast = sum(part.values[0] for part in parts if part.name == "weight copies")
        held.append((kept + cast) / case.profile.parameters)
        seconds.append(float(optimizer_component(sheet).values[0]))
    assert held == pytest.approx([wide, wide - 4, 8], abs=0.01)
    assert seconds[1] / seconds[0] == pytest.approx((12 + 8 + 12) / 40), "weights and gradients of 4, moments of 2"
    assert seconds[2] / seconds[0] == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("ZeRO-3", "3"), ("zero3", "3"), ("stage 3", "3"), ("3.0", "3"), ("zero_1", "1"), ("1 (dist_opt)", "1"),
        ("SHARD_GRAD_OP", "2"), ("FULL_SHARD", "fsdp"), ("fsdp2", "fsdp"), ("HYBRID_SHARD", "hsdp"), ("DDP", "0"),
        ("NO_SHARD", "0"), ("none", "0"), ("distributed_optimizer", "dist_opt"), ("1(group 8)", "1 group 8"),
        ("fsdp ici=8 dcn=16 dp=4", "fsdp dp=4"), ("fsdp+dp", "fsdp+dp"), ("3+offload", "3 offload"), ("", ""),
    ],
)  # fmt: skip
def test_shards_in_other_words(word: str, meant: str) -> None:
    assert sharding_of(word, []) == meant


def test_a_word_for_shards_that_means_nothing_leaves_them_open() -> None:
    case = case_of(zero_stage="zorro", program="deepspeed")
    assert {plan.zero for plan in case.plans} == {1, 2, 3} and "sharding zorro is not known" in case.marks


def test_recompute_in_other_words() -> None:
    assert [recompute_of(word) for word in ("None", "False", "0", "off")] == ["none"] * 4
    assert [recompute_of(word) for word in ("True", "full/uniform 1", "FULL", "1")] == ["full"] * 4
    assert recompute_of("save_dot_except_mlp") == "save_dot_except_mlp" and recompute_of("selective") == "selective"
    assert {plan.recompute for plan in case_of(recompute="False").plans} == {"none"}


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("H100-SXM5-80GB", "h100-sxm"), ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("8xH100", "h100-sxm"),
        ("DGX H100", "h100-sxm"), ("h100_80gb", "h100-sxm"), ("H100 80G", "h100-sxm"), ("DGX-B200", "b200"),
        ("A100-SXM-80GB-450W", "a100-80"), ("p4d.24xlarge", "a100-40"), ("v5p-128", "tpu-v5p"),
        ("v5litepod-256", "tpu-v5e"), ("trn1.32xlarge", "trn1"), ("HPU Gaudi 3", "gaudi3"),
    ],
)  # fmt: skip
def test_machines_in_other_words(name: str, entry: str) -> None:
    found, because = Machines().entry(name)
    assert found is not None and found.name == entry, because


def test_programs_in_other_words() -> None:
    for name, known in (
        ("NeMo 25.02", "NeMo"), ("NVIDIA NeMo", "NeMo"), ("mcore", "Megatron-LM"),
        ("GPT-NeoX 2.0", "Megatron-DeepSpeed"),
        ("Pai-Megatron-Patch", "Megatron-LM"), ("Primus (torchtitan)", "torchtitan"), ("JAX MaxText", "MaxText"),
        ("PyTorch FSDP", "PyTorch FSDP"), ("nanoGPT", "nanoGPT"),
    ):  # fmt: skip
        found, assumed = program_of(name, "")
        assert (found.name, assumed) == (known, ""), name
    eager, assumed = program_of("axolotl", "fsdp")
    assert not eager.fused and eager.name == "PyTorch FSDP" and "Transformers" in assumed
    assert program_of("axolotl", "3")[0].name == program_of("XTuner 0.1", "3")[0].name == "DeepSpeed"


def test_a_strangers_shards_come_with_torchs_own_loss() -> None:
    """Logits in bf16, and what separate kernels make of them: 12 bytes a logit, where a fused loss holds 8."""
    stranger, assumed = program_of("prime-rl", "fsdp2")
    assert stranger.name == "PyTorch FSDP" and stranger.logit_share == EAGER_LOGITS and "prime-rl" in assumed
    assert program_of("pytorch-fsdp1", "fsdp")[0].logit_share == 0.0, "a program that is known is as it is known"


def test_mfu_in_per_cent_is_the_same_as_a_fraction() -> None:
    given = {"measured_step_s": None, "tflops_convention": "6n"}
    whole, part = (case_of(EIGHT, measured_mfu=mfu, **given) for mfu in (45.0, 0.45))
    assert whole.step_seconds == part.step_seconds and "MFU taken to be in per cent" in whole.marks
    assert reason_of(EIGHT, measured_mfu=1.2, **given) == "MFU above 1"


def test_what_all_devices_did_is_not_what_one_did() -> None:
    """8.03e9 parameters, 0.53e9 of them an embedding: 45 GFLOP a token and half a one of attention at 1,024.

    At 88,000 tokens a second on each of eight: 88e3 x 45.8e9 = 4.03e15, 4.1 times the 989e12 of an H100.
    """
    given = {"measured_step_s": None, "measured_tokens_per_s_per_device": 88_000.0}
    assert reason_of(EIGHT, **given).startswith("measured at 4.08 times the device's peak")
    assert case_of(EIGHT, **{**given, "measured_tokens_per_s_per_device": 11_000.0}).step_seconds


def test_milliseconds_are_no_seconds(tmp_path: Path) -> None:
    rows = [cells_of(EIGHT), cells_of(EIGHT, measured_step_s=6000.0), cells_of(EIGHT, measured_step_s=60.0)]
    (file,) = run_backtest([write_table(tmp_path / "a.csv", rows)]).files
    assert file.score.scored == 2 and [item.row.line for item in file.unscored] == [3]
    assert "milliseconds" in file.unscored[0].reason


def test_a_batch_in_tokens_is_one_in_sequences() -> None:
    case = case_of(EIGHT, global_batch=4 * 2**20 * 512, measured_step_s=30_000.0)
    assert case.batch_samples == 4 * 2**20 * 512 // 8192 and "global batch taken to be in tokens" in case.marks
    assert case_of(EIGHT, global_batch=1 << 15, measured_step_s=4e3).batch_samples == 1 << 15  # 268 M tokens may be


def test_settings_that_contradict_each_other_are_named() -> None:
    moe = {"arch": "moe", "experts": 4, "topk": 2}
    assert reason_of(**{**moe, "topk": 8}) == "a token passes more experts than there are"
    assert reason_of(**moe, ep=8) == "ep does not divide the experts"
    assert reason_of(kv_heads=5) == "kv_heads does not divide heads"
    assert reason_of(tp=64, dp=1, n_devices=64) == "more tensor ranks than heads"


def test_shared_keys_of_known_families_are_not_forgotten() -> None:
    stated, unstated = case_of(EIGHT), case_of(EIGHT, kv_heads=None, model="Llama-3.1-8B")
    unstated_name = case_of(EIGHT, kv_heads=None, model="llama3.1-8b")
    assert unstated.profile.parameters == unstated_name.profile.parameters == stated.profile.parameters
    other = case_of(EIGHT, kv_heads=None, model="ours")
    assert other.profile.parameters == stated.profile.parameters + 32 * 2 * 4096 * (32 - 8) * 128
    assert "as many heads of keys and values as of queries assumed" in other.marks


def test_cells_of_numbers_as_strangers_write_them(tmp_path: Path) -> None:
    strange = {"vpp": "n/a", "n_params": "8,030,261,248", "n_devices": "8.0", "ep": "-", "measured_step_s": " 6.0 "}
    rows = [cells_of(EIGHT, **strange), cells_of(EIGHT, measured_step_s="3,5"), cells_of(EIGHT, layers="32 layers")]
    rows += [cells_of(EIGHT, measured_step_s=None, measured_mfu="45%", tflops_convention="6n")]
    (file,) = run_backtest([write_table(tmp_path / "a.csv", rows)]).files
    (first, last) = file.steps
    assert first.case.row.n_params == 8_030_261_248 and first.case.row.vpp is None and first.case.step_seconds == 6.0
    assert last.case.step_seconds == case_of(EIGHT, measured_step_s=None, measured_mfu=0.45,
                                             tflops_convention="6n").step_seconds  # fmt: skip
    assert [item.reason for item in file.unscored] == [
        "unreadable: measured_step_s = '3,5' is not a number", "unreadable: layers = '32 layers' is not a whole number"
    ]  # fmt: skip


def test_a_table_of_the_fewest_columns_is_scored(tmp_path: Path) -> None:
    names = ("model", "layers", "hidden", "seq_len", "accelerator", "n_devices", "dp", "measured_step_s")
    cells = {name: value for name, value in cells_of(EIGHT).items() if name in names}
    (file,) = run_backtest([write_table(tmp_path / "a.csv", [cells, {**cells, "accelerator": "Cerebras CS-2"}])]).files
    assert file.score.scored == 1 and list(file.score.not_scored) == ["accelerator Cerebras CS-2 is not in the catalog"]
    assert {"bf16 assumed", "heads of width 128 assumed"} <= set(file.score.marks)


# Qwen3 235B of Pai-Megatron-Patch on 256 H800: experts over 8 devices, where a stage has 4 x 2.
QWEN = replace(
    LLAMA, program="megatron-core", model="qwen3-235b-a22b", arch="moe", layers=94, ffn_hidden=1536, heads=64,
    kv_heads=4, head_dim=128, vocab=151936, experts=128, topk=8, accelerator="H800", n_devices=256, tp=2, pp=32,
    vpp=3, ep=8, dp=4, pp_schedule="interleaved_1f1b", zero_stage="dist_opt", micro_batch=1, global_batch=2048,
    recompute="full",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "spread"),
    [
        ({}, True),
        ({"ep": 4}, False),  # four data ranks are four parts of the experts
        ({"tp": 1, "dp": 8}, False),
        ({"tp": 8, "dp": 1, "ep": 4}, False),  # half of the tensor ranks: neither all of them nor none
    ],
)
def test_experts_over_more_ranks_than_read_samples_are_spread_over_tensor_ranks(changes: dict, spread: bool) -> None:
    row = replace(QWEN, **changes)
    assert spreads_experts(row) is spread
    if (row.ep and row.dp and row.dp % row.ep == 0) or spread:
        case = case_of(row)
        group = 4 if spread else row.ep
        assert {plan.layout.ep for plan in case.plans} == {group}, "of 8 devices, of which tp has 2 each"
        assert software_of(case).spreads_experts is spread
        assert not any("split by tp" in mark for mark in case.marks)


@pytest.mark.parametrize(
    ("notes", "model", "flash"),
    [
        ("shapes from memory; 126M without flash attention; remat not printed", "gpt-126M", False),
        ("shapes from memory; 126M without flash attention; remat not printed", "gpt-5B", True),
        ("5B without flash attention", "gpt-5B", False),
        ("5B without flash attention", "gpt-1.5B", True),
        ("5B without flash attention", "gpt-175B", True),
        ("without flash attention", "gpt-5B", False),
        ("no flash-attention", "gpt-5B", False),
        ("with flash attention", "gpt-5B", True),
    ],
)
def test_what_notes_say_of_flash_attention_holds_for_the_model_they_name(notes: str, model: str, flash: bool) -> None:
    row = replace(
        LLAMA, arch="gpt", model=model, program="paxml", precision="te-bf16", attention_kernel="", notes=notes
    )
    shape, _ = shape_of(row)
    assert shape is not None and shape.flash is flash


GPT2 = replace(LLAMA, arch="gpt", model="gpt2-xl", program="transformers", notes="", compile=0)


@pytest.mark.parametrize(
    ("changes", "in_pieces"),
    [
        ({}, True),
        ({"model": "gpt-neo-1.3b"}, True),
        ({"model": "gptj-6b", "program": "accelerate"}, True),
        ({"program": "pytorch-ddp", "notes": "GPT-2 of Transformers; AMP"}, True),
        ({"program": "pytorch-fsdp1", "notes": "p3.8xlarge; minGPT's NewGELU"}, True),
        ({"program": "megatron-lm"}, False),
        ({"model": "gpt-neox-20b"}, False),
        ({"model": "falcon-7b"}, False),
        ({"notes": "fused GELU"}, False),
        ({"compile": 1}, False),
    ],
)
def test_gpt2_by_transformers_computes_its_activation_in_pieces(changes: dict[str, object], in_pieces: bool) -> None:
    """Its configuration's `gelu_new` is eight operators, which a compiler or a fused kernel makes one of."""
    shape, _ = shape_of(replace(GPT2, **changes))  # type: ignore[arg-type]
    assert shape is not None and shape.gelu_in_pieces is in_pieces


LLAMA_BY_ENGINE = replace(LLAMA, model="qwen-1.8b", program="deepspeed", notes="", compile=0)


@pytest.mark.parametrize(
    ("changes", "in_pieces"),
    [
        ({}, True),
        ({"compile": None}, True),
        ({"program": "accelerate"}, True),
        ({"program": "pytorch-fsdp2", "notes": "FSDP2 on modules of transformers"}, True),
        ({"compile": 1}, False),
        ({"program": "pytorch-fsdp2"}, False),
        ({"program": "megatron-deepspeed"}, False),
        ({"arch": "gpt"}, False),
    ],
)
def test_a_llama_by_deepspeed_is_of_transformers_and_has_norms_in_pieces(
    changes: dict[str, object], in_pieces: bool
) -> None:
    """Eleven rounds had 5.5 ms a layer and micro-batch for a Qwen of 1.8 billion that took 11 whatever its length."""
    shape, _ = shape_of(replace(LLAMA_BY_ENGINE, **changes))  # type: ignore[arg-type]
    assert shape is not None and shape.norms_in_pieces is in_pieces


@pytest.mark.parametrize(
    ("notes", "by_count"),
    [
        ("", 52 + 100),
        ("weights and moments in bf16", 40 + 82),
        ("weights in fp32, gradients in bf16", 52 + 100),
        ("LoRA of attention, rank 8", 56 + 94),
        ("LoRA of all linear layers, rank 8", 68 + 118),
    ],
)
def test_a_layer_of_transformers_starts_as_many_operators_as_were_counted(notes: str, by_count: int) -> None:
    """What rests in 16 bits is not cast and what is frozen has no gradient: LoRA was told 245 operators of 150."""
    case = case_of(LLAMA_BY_ENGINE, program="trl", zero_stage="0", n_devices=1, dp=1, notes=notes, global_batch=2)
    (layer,) = {replace(block, name="") for block in case.profile.blocks if block.recomputable}
    started = layer.plain_operators + (layer.operators - layer.plain_operators) * read_constants().unfused_launches
    assert 3 * started == pytest.approx(by_count, rel=0.03)
    context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software_of(case))
    ends = sum(block.operators for block in case.profile.blocks if not block.recomputable)
    assert host_starts(context.sheet(case.plans[0])).operators[0] == pytest.approx(32 * started + ends)


@pytest.mark.parametrize(("program", "compiled", "fused"), [
    ("accelerate", 1, True), ("accelerate", 0, False), ("accelerate", None, False), ("pytorch-fsdp1", 1, True),
])  # fmt: skip
def test_modules_of_transformers_that_are_compiled_have_fused_kernels(
    program: str, compiled: int | None, fused: bool
) -> None:
    assert software_of(case_of(program=program, compile=compiled)).fused is fused


def test_the_fourth_flash_attention_is_faster_on_blackwell_alone() -> None:
    def attention(**changes: Any) -> float:
        (priced,) = price_cases([case_of(EIGHT, **changes)])
        assert isinstance(priced, Priced)
        return sum(term.seconds for term in priced.terms if term.kind == "attention")

    blackwell = {"accelerator": "B200", "measured_step_s": 3.0}
    assert attention(**blackwell, attention_kernel="flash 4") == pytest.approx(attention(**blackwell) / 1.3)
    assert attention(attention_kernel="FA4") == attention(attention_kernel="flash")
    assert attention(**blackwell, attention_kernel="flash 3") == attention(**blackwell)


@pytest.mark.parametrize(("told", "fused"), [(0, False), (1, True), (None, True)])
def test_fsdp_of_a_row_that_was_not_compiled_has_separate_kernels(told: int | None, fused: bool) -> None:
    assert software_of(case_of(program="pytorch-fsdp1", compile=told)).fused is fused


def test_uncompiled_tensor_ranks_of_torchtitan_start_operators_on_dtensors() -> None:
    """A layer of 15 operators, 1.99 times as many apart, takes the host 0.1 ms more for each in four passes."""
    row = replace(LLAMA, program="torchtitan", tp=8, dp=1, global_batch=2, recompute="full", seq_len=128)

    def launches(**changes: Any) -> float:
        case = case_of(row, **changes)
        context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software_of(case))
        sheet = context.sheet(case.plans[0])
        assert ("on DTensors" in launch_component(sheet, np.zeros(1)).text(0)) is (changes == {"compile": 0})
        return float(host_starts(sheet).seconds[0])

    compiled = launches(compile=1)
    assert launches(compile=0, program="pytorch-fsdp2") == launches(compile=None, program="pytorch-fsdp2")
    own, layers, ends = launches(compile=0, program="pytorch-fsdp2"), 32, 3 * (1 + 1 + 6) + 2 * (1 + 1)
    tensor = 4 * 2 + 4  # a layer's four collectives in forward and backward, two for each, and once in recompute
    each = 4 * 15 * read_constants().unfused_launches + tensor
    assert launches(compile=0) == pytest.approx(own + 1e-4 * (layers * each + ends), rel=1e-6)
    assert compiled < own


@pytest.mark.parametrize(
    ("notes", "rank", "base", "attention_only"),
    [
        ("LoRA of the four projections of attention, rank 8", 8, "bf16", True),
        ("QLoRA of all linear layers, rank 64, weights in NF4", 64, "nf4", False),
        ("Finetuning LORA BF16 (TP=2)", 16, "bf16", True), ("LoRA; r=32; every linear layer", 32, "bf16", False),
        ("Finetuning with LoRA; quantization bnb.nf4-dq", 16, "nf4", True),
    ],
)  # fmt: skip
def test_adapters_in_other_words(notes: str, rank: int, base: str, attention_only: bool) -> None:
    marks: list[str] = []
    spec, found, reason = adapter_of(replace(LLAMA, notes=notes), marks)
    assert spec is not None and not reason
    assert (spec.rank, spec.base_dtype, found) == (rank, base, attention_only)
    assert ("adapters of rank 16 assumed" in marks) == ("rank" not in notes and "r=" not in notes)


@pytest.mark.parametrize(
    ("notes", "rank", "marks"),
    [
        ("LoRA of attention; memory of rank 0", 16, ["adapters of rank 16 assumed"]),
        ("LoRA of attention, head dim 128, rank: 8", 8, []),
        ("lora_rank=32, attention", 32, []),
        ("DeepSeek R1, LoRA of attention", 16, ["adapters of rank 16 assumed"]),
        ("LoRA, rank 8, flash attention 2", 8, ["adapters beside attention assumed"]),
        ("QLoRA of attention, rank 64, AdamW 8-bit", 64, []),
        ("QLoRA of attention, rank 64, 8-bit AdamW", 64, []),
    ],
)
def test_what_is_said_of_others_is_no_rank_and_no_place_of_adapters(notes: str, rank: int, marks: list[str]) -> None:
    found: list[str] = []
    spec, attention_only, reason = adapter_of(replace(LLAMA, notes=notes), found)
    assert spec is not None and (spec.rank, attention_only, reason) == (rank, True, "")
    assert found == marks


@pytest.mark.parametrize("notes", ["all weights, no LoRA", "full, not QLoRA", "non-LoRA baseline", "LoRA-free"])
def test_a_row_without_adapters_trains_all(notes: str) -> None:
    assert adapter_of(replace(LLAMA, notes=notes), []) == (None, False, "")


@pytest.mark.parametrize("program", ["pytorch-fsdp2", "megatron-lm", "trl"])
def test_frozen_weights_rest_in_two_bytes_and_adapters_alone_have_gradients_and_moments(program: str) -> None:
    """Of 6.74e9 weights 13.5 GB; of 16.8e6 in adapters 16 or 18 bytes each, 0.3 GB."""
    row = {"program": program, "n_devices": 1, "dp": 1, "zero_stage": "", "global_batch": 2, "recompute": "full"}
    case = case_of(notes="LoRA of the projections of attention, rank 16", **row)
    context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software_of(case))
    parts = pricing.memory_components(context.sheet(case.plans[0]))
    kinds = {kind: sum(part.values[0] for part in parts if part.kind == kind) for kind in ("gradients", "optimizer")}
    weights = next(part.values[0] for part in parts if part.name == "weights")
    frozen, trained = case.profile.parameters - case.profile.trained_parameters, 16_777_216
    assert 2 * frozen <= weights <= 2 * frozen + 4 * trained, "those of adapters in fp32 where their program has them"
    assert 2 * trained <= kinds["gradients"] <= 6 * trained
    assert 8 * trained <= kinds["optimizer"] <= 12 * trained


def test_a_step_of_adapters_spares_a_third_of_the_products() -> None:
    row = {"n_devices": 1, "dp": 1, "zero_stage": "", "global_batch": 2}
    whole, some = case_of(**row), case_of(notes="LoRA of the projections of attention, rank 16", **row)
    products = [
        sum(block.matmul_flops * (1 + block.backward_products) for block in case.profile.blocks)
        for case in (whole, some)
    ]
    assert products[1] / products[0] == pytest.approx(2 / 3, abs=0.01)


def test_weights_in_four_bits_are_shards_of_fsdp_and_whole_on_copies() -> None:
    notes = "QLoRA of all linear layers, rank 16"
    assert {plan.frozen for plan in case_of(notes=notes).plans} == {"spread"}
    assert {plan.frozen for plan in case_of(notes=notes, zero_stage="0").plans} == {"as-model"}


@pytest.mark.parametrize(
    ("word", "layers", "kept"),
    [
        ("10 of 80 layers", 20, 0.875), ("1 of 2", 4, 0.5), ("recompute_num_layers=1", 4, 0.75),
        ("recompute_num_layers=8", 4, 0.0), ("memory budget 0.5", 4, 0.5), ("activation_memory_budget=1.0", 4, 1.0),
        ("full", 4, None), ("selective", 4, None), ("10 of many", 4, None),
        ("recompute_method=uniform recompute_num_layers=1", 4, None),
    ],
)  # fmt: skip
def test_recompute_of_a_part(word: str, layers: int, kept: float | None) -> None:
    assert part_kept(recompute_of(word), layers) == kept


def test_what_megatron_computes_again_by_equal_parts_is_all() -> None:
    """`--recompute-num-layers` is then how many layers have one input kept."""
    assert recompute_of("recompute_method=uniform recompute_num_layers=1") == "full"


def test_recompute_of_a_part_is_a_budget() -> None:
    plan = case_of(recompute="8 of 32 layers").plans[0]
    assert (plan.recompute, plan.recompute_budget) == ("budget", 0.75)
    assert case_of(recompute="0 of 32 layers").plans[0].recompute == "none"
    chunks = {"pp": 8, "vpp": 2, "dp": 1, "zero_stage": "", "global_batch": 64}
    assert case_of(recompute="recompute_num_layers=1", **chunks).plans[0].recompute_budget == 0.5
    assert case_of(recompute="recompute_num_layers=2", **chunks).plans[0].recompute == "full"


def held_by(**changes: Any) -> dict[str, float]:
    """Return the bytes of every component of the memory of the first plan of a row."""
    case = case_of(**changes)
    context = PricedTask(case.profile, case.cluster, case.batch_samples, 1, software=software_of(case))
    return {part.name: float(part.values[0]) for part in pricing.memory_components(context.sheet(case.plans[0]))}


def test_a_model_that_is_trained_in_bf16_has_ten_bytes_a_weight_at_its_update() -> None:
    """Weight, gradient, two moments, and the roots of the second ones: fms-acceleration's 67.46 GiB of 7.24e9."""
    row = {"program": "trl", "n_devices": 1, "dp": 1, "zero_stage": "0", "global_batch": 1, "recompute": "full"}
    narrow = held_by(notes="weights and moments in bf16", micro_batch=1, **row)
    held = sum(narrow.values()) - narrow["runtime"] - narrow["allocator buffers"]
    assert held == pytest.approx(10 * 6.738e9, rel=0.001)
    assert "flat gradients" not in narrow
    named = held_by(notes="weights and moments in bf16", micro_batch=1, **{**row, "program": "deepspeed"})
    assert named["flat gradients"] > 0 and "roots" not in named, "its own optimizer makes them flat"
    by_class = {**row, "n_devices": 8, "dp": 8, "global_batch": 8, "zero_stage": "2"}
    assert "roots" not in held_by(notes="weights and moments in bf16", micro_batch=1, **by_class), "ZeRO is DeepSpeed's"
    fused = held_by(notes="weights and moments in bf16; adamw_torch_fused", micro_batch=1, **row)
    assert "roots" not in fused, "one kernel reads and writes each weight"


@pytest.mark.parametrize(
    ("zero", "notes", "program", "values"),
    [
        ("2", "overlap_comm, buckets of 5e8", "deepspeed", 1e9), ("2", "", "deepspeed", 5e8),
        ("3", "overlap_comm", "deepspeed", 5e8), ("1", "", "deepspeed", 5e8),
        ("2", "no overlap_comm", "deepspeed", 5e8), ("2", "overlap_comm=False", "deepspeed", 5e8),
        ("0", "", "deepspeed", 25 * 2**19), ("2", "", "transformers", 0),
    ],
)  # fmt: skip
def test_deepspeed_sets_buckets_aside_whatever_the_size_of_a_model(
    zero: str, notes: str, program: str, values: float
) -> None:
    """MiniTrainBench's model of 23 M weights holds 2.01 GiB by ZeRO-2 and 1.09 by ZeRO-3, on each of eight GPUs."""
    row = {"n_devices": 8, "dp": 8, "global_batch": 8, "micro_batch": 1, "zero_stage": zero}
    assert held_by(program=program, notes=notes, **row)["communication buffers"] == 2 * values


def test_copies_of_torch_have_their_gradients_in_buckets_too() -> None:
    """MiniTrainBench's models of 168 and 731 M weights hold 24.2 bytes a weight with DistributedDataParallel."""
    row = {"n_devices": 8, "dp": 8, "global_batch": 8, "micro_batch": 1, "zero_stage": "0", "recompute": "full"}
    held = held_by(program="ddp", **row)
    assert held["communication buffers"] == pytest.approx(4 * 6.738e9, rel=0.001)
    assert held["roots"] > 0
    assert "roots" not in held_by(program="nanogpt", **row), "its AdamW is the fused one"
    for notes in ("gradient_as_bucket_view, fused AdamW", "NVIDIA's DeepLearningExamples under apex"):
        views = held_by(program="ddp", notes=notes, **row)
        assert views["communication buffers"] == 25 * 2**20
        assert "roots" not in views
    plain = held_by(program="ddp", notes="gradient_as_bucket_view=False, no fused AdamW", **row)
    assert plain["communication buffers"] == held["communication buffers"] and plain["roots"] == held["roots"]


def test_logits_of_liger_are_never_there_at_once() -> None:
    row = {"program": "ms-swift", "zero_stage": "fsdp", "recompute": "full"}
    names = ("activations", "transients")
    with_it, without = (
        [sum(held_by(notes=notes, vocab=vocab, **row)[name] for name in names) for vocab in (32_000, 256_000)]
        for notes in ("packed, Liger kernels", "packed")
    )
    told = [held_by(notes=notes, vocab=256_000, **row)[names[0]] for notes in ("packed", "no Liger", "Liger off")]
    assert told[0] == told[1] == told[2] > held_by(notes="Liger 0.5.2", vocab=256_000, **row)[names[0]]
    assert with_it[1] == pytest.approx(with_it[0], rel=0.01)
    assert without[1] > 3 * without[0] > 3 * with_it[0]
