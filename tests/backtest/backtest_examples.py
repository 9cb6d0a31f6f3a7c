"""Rows and tables for the tests of backtests."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.backtest.rows import Case, Reader
from paceline.backtest.schema import StepRow

LLAMA = StepRow(
    source="a table", model="llama-7b", arch="llama", layers=32, hidden=4096, ffn_hidden=11008, heads=32, vocab=32000,
    seq_len=4096, accelerator="A100-80GB", n_devices=8, devices_per_node=8, precision="bf16", tp=1, pp=1, cp=1, dp=8,
    zero_stage="fsdp3", micro_batch=2, global_batch=64, recompute="none", attention_kernel="flash",
    measured_step_s=20.0,
)  # fmt: skip


def case_of(row: StepRow = LLAMA, **changes: Any) -> Case:
    """Return the case of a row with changes; fails where it is not scored."""
    case, reason = Reader().case(replace(row, **changes))
    assert case is not None, reason
    return case


def reason_of(row: StepRow = LLAMA, **changes: Any) -> str:
    """Return why a row with changes is not scored; fails where it is."""
    case, reason = Reader().case(replace(row, **changes))
    assert case is None
    return reason


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as CSV, with the columns of the first."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def cells_of(row: StepRow, **changes: Any) -> dict[str, Any]:
    """Return the cells of a row with changes."""
    kept = {name: value for name, value in vars(row).items() if name not in ("file", "line", "problem")}
    return {**kept, **changes}
