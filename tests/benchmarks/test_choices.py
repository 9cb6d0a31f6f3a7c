"""The benchmark of choices: regrets and pairs of a small table, against arithmetic by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.backtest.backtest import run_backtest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "choices.py"
HEAD = (
    "source,model,arch,layers,hidden,heads,vocab,seq_len,accelerator,n_devices,devices_per_node,precision,tp,sp,pp,"
    "pp_schedule,zero_stage,micro_batch,global_batch,recompute,attention_kernel,measured_step_s"
)
# tp, pp, micro-batch, and a time that no forecast gives in this order
ROWS = ((8, 1, 4, 9.0), (4, 2, 2, 6.0), (2, 4, 1, 7.5), (1, 8, 1, 12.0))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = [
        f"a test,gpt-22B,gpt,48,6144,64,51200,2048,A100-80GB,8,8,bf16,{tp},1,{pp},1f1b,0,{micro},32,"
        f"selective,flash2,{seconds}"
        for tp, pp, micro, seconds in ROWS
    ]
    path = tmp_path / "grid.csv"
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return path


def test_regrets_and_pairs_of_a_table(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(table), "--json", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(out.read_text())
    scored = run_backtest([table]).steps()
    chosen = min(scored, key=lambda item: item.priced.step_seconds.value)
    assert found["groups"] == 1 and len(scored) == len(ROWS)
    assert found["regret"] == pytest.approx(chosen.case.step_seconds / 6.0 - 1)
    assert 0 <= found["regret_tried"] <= found["regret"] and 1 <= found["tried"] <= 3
    assert sum(count for _, _, count in found["reliability"]) == 6, "pairs of four rows"
    assert all(0.5 <= said <= 1 and 0 <= true <= 1 for said, true, _ in found["reliability"])
    assert "grid.csv: 1 groups" in done.stdout
