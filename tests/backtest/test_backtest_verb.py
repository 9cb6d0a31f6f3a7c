"""`paceline backtest` end to end: published rows are forecast within bounds, and the numbers printed add up."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from pathlib import Path

import pytest
from backtest_examples import LLAMA, cells_of, write_table

from paceline.backtest.backtest import run_backtest
from paceline.backtest.statistics import mean
from paceline.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "measured-steps.csv"
FILE_KEYS = {"file", "rows", "scored", "not_scored", "step_time", "memory", "choice", "power"}


def backtest_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["backtest", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_published_rows_are_forecast_within_a_third() -> None:
    score = run_backtest([EXAMPLE]).files[0].score
    assert (score.rows, score.scored) == (5, 5)
    assert score.step_time is not None and score.step_time.n == 5
    assert score.step_time.worst < 1 / 3


def test_json_has_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    told = backtest_json(capsys, str(EXAMPLE), "--by", "model")
    assert len(told["constants_sha256"]) == 64
    (file,) = told["files"]
    assert set(file) >= FILE_KEYS
    assert {"mape", "median", "bias", "worst", "null_mape", "coverage_80", "coverage_95"} <= set(file["step_time"])
    assert {"mape", "bias", "worst", "oom_rows", "oom_called_feasible", "ok_called_infeasible"} <= set(file["memory"])
    assert {"groups", "spearman_median", "regret_median", "regret_worst"} <= set(file["choice"])
    assert [part["name"] for part in told["by"]["model"]] == ["gpt-175B", "gpt-1T", "gpt-22B"]


def test_rows_hold_every_row_and_make_the_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [cells_of(LLAMA, micro_batch=size, measured_step_s=20 + size) for size in (1, 2, 4)]
    rows += [cells_of(LLAMA, status="suspect"), cells_of(LLAMA, layers=None), cells_of(LLAMA, tp="x")]
    table = write_table(tmp_path / "mine.csv", rows)
    out = tmp_path / "rows.csv"
    told = backtest_json(capsys, str(table), str(EXAMPLE), "--rows", str(out))
    written = list(csv.DictReader(out.open()))
    assert len(written) == 6 + 5
    mine = [row for row in written if row["file"] == str(table)]
    assert [int(row["line"]) for row in mine] == [2, 3, 4, 5, 6, 7]
    score = told["files"][0]
    errors = [float(row["error"]) for row in mine if row["error"]]
    assert score["step_time"]["mape"] == pytest.approx(mean(map(abs, errors)))
    assert score["not_scored"] == dict(Counter(row["reason"] for row in mine if row["reason"]))
    assert score["scored"] + sum(score["not_scored"].values()) == score["rows"] == 6
    for row in mine[:3]:
        assert float(row["error"]) == pytest.approx(float(row["forecast_step_s"]) / float(row["measured_step_s"]) - 1)
        low, value, high = (float(row[name]) for name in ("low_95_s", "forecast_step_s", "high_95_s"))
        assert low < float(row["low_80_s"]) < value < float(row["high_80_s"]) < high
        parts = [float(part.rpartition("=")[2]) for part in row["terms"].split("; ")]
        assert math.fsum(parts) == pytest.approx(value, rel=1e-3)


def test_tables_of_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collectives = write_table(tmp_path / "c.csv", [
        {"collective": "AllReduce", "message_bytes": 2**30, "nodes": 1, "devices_per_node": 8, "group_size": 8,
         "accelerator": "A100", "busbw_gb_s": 230, "time_us": ""},
        {"collective": "AllGather", "message_bytes": "", "nodes": 2, "devices_per_node": 8, "group_size": "",
         "accelerator": "A100", "busbw_gb_s": 100, "time_us": ""},
        {"collective": "P2P", "message_bytes": 2**28, "nodes": 1, "devices_per_node": 8, "group_size": 2,
         "accelerator": "A100", "busbw_gb_s": "", "time_us": 1200},
        {"collective": "overlap", "message_bytes": "", "nodes": 1, "devices_per_node": 8, "group_size": "",
         "accelerator": "A100", "busbw_gb_s": 1, "time_us": ""},
    ])  # fmt: skip
    power = write_table(tmp_path / "p.csv", [{"accelerator": "H100-80GB", "node_steady_w_per_device": 850}])
    layers = write_table(tmp_path / "l.csv", [  # Korthikanti et al. 2022, table 4, baseline
        {"model": "22B", "hidden": 6144, "heads": 64, "tp": 8, "micro_batch": 4, "seq_len": 2048,
         "accelerator": "A100-80GB", "sp": 1, "recompute": "none", "combined_ms": 19.0}])  # fmt: skip
    runs = write_table(tmp_path / "r.csv", [  # BLOOM: Luccioni et al. 2022, arXiv:2211.02001, the devices' share
        {"model": "BLOOM", "accelerator": "A100-80GB", "device_hours": 1_082_990, "energy_mwh": 433, "pue": ""},
        {"model": "other", "accelerator": "A100-80GB", "device_hours": 5, "energy_mwh": "", "pue": ""}])  # fmt: skip
    files = backtest_json(capsys, str(collectives), str(power), str(layers), str(runs))["files"]
    assert [file["kind"] for file in files] == ["collectives", "power", "layers", "runs"]
    assert files[0]["scored"] == 3 and files[0]["not_scored"] == {"overlap is no collective": 1}
    assert files[0]["marks"]["message of 256 MiB assumed"] == 1
    assert files[1]["power"]["mape"] < 0.25
    assert files[2]["layers"]["mape"] < 0.25
    assert files[3]["scored"] == 1 and files[3]["not_scored"] == {"no energy is stated": 1}
    assert files[3]["energy"]["mape"] < 0.5


def test_people_are_told_what_machines_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", str(EXAMPLE), "--by", "accelerator"]) == 0
    told = capsys.readouterr().out
    assert "measured-steps.csv: 5 rows, 5 scored" in told
    assert "null MFU: NVIDIA A100 SXM4 80GB fp16" in told


@pytest.mark.parametrize(
    ("words", "code"), [(["none.csv"], 5), ([], 2), ([str(EXAMPLE), "--by", "colour"], 2),
                        ([str(EXAMPLE), "--rows", "/nowhere/rows.csv"], 74)],
)  # fmt: skip
def test_exit_codes(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", *words]) == code
    assert "try" in capsys.readouterr().err
