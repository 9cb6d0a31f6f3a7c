"""Whatever a row says, it is scored or says why not: a table of others must never end a backtest."""

from __future__ import annotations

import random
from typing import Any

from backtest_examples import LLAMA, cells_of

from paceline.backtest.price import Priced, price_cases
from paceline.backtest.rows import Reader
from paceline.backtest.schema import StepRow
from paceline.backtest.score import Scored, choice_score, memory_score, time_score

ODD: dict[str, list[Any]] = {
    "arch": ["", "gpt", "moe", "bert", "t5", "x"], "model": ["deepseek-v3", "mpt-7b", "qwen3-30b"],
    "layers": [0, 1, 7], "hidden": [0, 100, 64], "ffn_hidden": [None, 0, 100], "heads": [None, 0, 3, 128],
    "kv_heads": [None, 0, 64], "vocab": [None, 0], "seq_len": [None, 0, 1, 1000], "experts": [0, 8, 256],
    "topk": [0, 2, 9], "accelerator": ["", "L4", "TPU-v4", "x"], "n_devices": [None, 0, 1, 3, 12, 1000],
    "devices_per_node": [None, 0, 1, 16], "inter_bw": ["0Gbps", "8x200Gbps", "x"], "precision": ["", "fp8", "int8"],
    "tp": [None, 0, 2, 8], "sp": [0, 1], "pp": [None, 0, 2, 8], "pp_schedule": ["interleaved", "gpipe", "x"],
    "vpp": [0, 3], "cp": [None, 2], "ep": [0, 2, 8], "dp": [None, 0, 1, 4],
    "zero_stage": ["", "0", "2", "hsdp", "1(group 0)", "1(group 3)"], "micro_batch": [None, 0, 1000],
    "global_batch": [None, 0, 1, 5], "grad_accum": [None, 0, 4], "recompute": ["", "full", "selective", "x"],
    "attention_kernel": ["", "unfused"], "measured_step_s": [None, 0.0], "measured_memory_gib": [0.0, 30.0],
    "measured_mfu": [0.4], "measured_tflops_per_device": [0.0, 100.0], "tflops_convention": ["6n", "hardware"],
    "n_params": [0.0, 1e9], "status": ["oom", "failed", "x"], "notes": ["memory only", "x=y; swiglu=True"],
}  # fmt: skip


def test_any_row_is_scored_or_says_why_not() -> None:
    draw, reader = random.Random(11), Reader()
    scored, reasons = [], set()
    for _ in range(400):
        changes = {name: draw.choice(values) for name, values in ODD.items() if draw.random() < 0.12}
        case, reason = reader.case(StepRow(**cells_of(LLAMA, **changes)))
        if case is None:
            reasons.add(reason)
            continue
        (priced,) = price_cases([case])
        if isinstance(priced, Priced):
            scored.append(Scored(case, priced))
        else:
            reasons.add(priced)
    assert len(scored) > 50 and len(reasons) > 10 and all(reasons)
    assert time_score(scored).n and memory_score(scored).ok_rows
    choice_score(scored)  # whatever the groups are, it has an answer
