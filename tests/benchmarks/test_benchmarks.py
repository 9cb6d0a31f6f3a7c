"""The benchmarks run, in their quick form: what they print has its shape, and all loops do the same work."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import run_patiently

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def run_script(name: str, folder: Path, *arguments: str, **environ: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark and return its JSON result and what it printed. Its caches are its own."""
    out = folder / "result.json"
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = run_patiently(
        [sys.executable, SCRIPTS / name, *arguments, "--json", out],
        300,
        env={**os.environ, **own, **environ},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Check that every contender did the loop by hand's work, and that ratios lie in their intervals."""
    for row in rows:
        assert row["same_work"], row
        assert row["steps_per_second"] > 0
        for spread in (row["ratio"], row["cpu_ratio"]):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        if row["contender"] in ("bare", "by hand"):
            assert row["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_overhead_against_the_loop_by_hand(tmp_path: Path) -> None:
    result, printed = run_script("overhead.py", tmp_path, "--quick", "--processes", "1", "--contenders", "paceline")
    assert [row["contender"] for row in result["rows"]] == ["bare", "bare again", "paceline"]
    check_rows(result["rows"])
    assert result["machine"]["cores"] >= 1
    assert printed.count("\n| 1 process |") == 3


def test_deterministic_mode_gives_the_same_bits_and_its_price_is_shown(tmp_path: Path) -> None:
    result, printed = run_script("costs/deterministic.py", tmp_path, "--quick")
    assert result["equal"]["deterministic"] and "two runs with deterministic kernels: the same bits" in printed
    ratios = {row["loop"]: row["ratio"]["median"] for row in result["rows"]}
    assert ratios["usual"] == 1.0 and all(ratio > 0 for ratio in ratios.values()) and len(ratios) == 4


@pytest.mark.deep
def test_what_less_work_for_a_slow_rank_brings_is_shown(tmp_path: Path) -> None:
    result, printed = run_script("costs/stragglers.py", tmp_path, "--quick")
    assert [row["run"] for row in result["rows"]] == ["no slow rank", "even cut", "less work"]
    assert result["cuts"][0][0] > result["cuts"][0][1] and "rows in the end" in printed


@pytest.mark.deep
def test_a_rank_that_hangs_is_found_and_one_that_takes_long_is_let_be(tmp_path: Path) -> None:
    result, printed = run_script("costs/hangs.py", tmp_path, "--only", "locked")
    (found,) = result["told"]["locked"]
    assert found["hangs"] == 1 and found["detect"] >= found["limit_seconds"] and "| locked | " in printed
    result, _ = run_script("costs/hangs.py", tmp_path, "--only", "calm", "--calm-steps", "110")
    assert result["told"]["calm"][0]["hangs"] == 0 and result["told"]["calm"][0]["longest"] > 3.0


@pytest.mark.deep
def test_overhead_of_all_libraries_in_all_settings(tmp_path: Path) -> None:
    for library in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(library)
    result, _ = run_script("overhead.py", tmp_path, "--quick")
    settings = [(row["setting"], row["contender"]) for row in result["rows"]]
    libraries = ["bare", "bare again", "paceline", "accelerate", "fabric", "trainer"]
    assert settings == [
        *[("1 process", name) for name in libraries],
        *[("2 processes, replicated", name) for name in libraries],
        *[("2 processes, sharded", name) for name in libraries[:3]],
    ]
    check_rows(result["rows"])


def test_an_unknown_contender_is_refused(tmp_path: Path) -> None:
    done = run_patiently([sys.executable, SCRIPTS / "overhead.py", "--contenders", "nobody"])
    assert done.returncode == 2
    assert "unknown nobody; there are paceline" in done.stderr


LOOPS = ["by hand", "by hand again", "paceline"]


@pytest.mark.deep
def test_layouts_against_torch_by_hand(tmp_path: Path) -> None:
    result, printed = run_script("layouts.py", tmp_path, "--quick", "--axis", "cp")
    assert [row["contender"] for row in result["rows"]] == LOOPS
    check_rows(result["rows"])
    assert printed.count("\n| cp=2") == 3


@pytest.mark.deep
def test_every_axis_against_torch_by_hand(tmp_path: Path) -> None:
    result, _ = run_script("layouts.py", tmp_path, "--quick")
    check_rows(result["rows"])
    settings = list(dict.fromkeys(row["setting"] for row in result["rows"]))
    named = ["dp_replicate=2", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tp=2", "1F1B", "GPipe", "cp=2", "ep=2"]
    assert len(settings) == len(named) and all(name in found for name, found in zip(named, settings, strict=True))
    assert [row["contender"] for row in result["rows"]] == LOOPS * len(named)


def check_gpu(result: dict[str, Any], matrix_flops: float) -> None:
    """Check one model's result: both loops trained alike, and the figures agree with each other."""
    assert result["layers"] == result["layers_of"] == 5
    assert result["largest_loss_difference"] < 1e-2  # bf16 has 8 bits
    for loop in ("paceline", "by_hand"):
        row = result[loop]
        assert len(row["losses"]) == 5
        assert row["losses"][-1] < row["losses"][0]
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(result["batch"] * result["seq_len"])
        # Six FLOPs a weight and token; attention adds to it, and an embedding's weights are read and not multiplied.
        flops = row["mfu_matrix"] * matrix_flops * row["step_seconds"]
        assert flops == pytest.approx(6 * result["parameters"] * result["batch"] * result["seq_len"], rel=0.5)
        assert row["peak_bytes"] > 16 * result["parameters"]
    assert result["forecast"]["peak_bytes"] > 16 * result["parameters"]


@pytest.mark.deep
def test_gpu_benchmark_on_the_cpu(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--quick", "--no-compile")
    result, printed = run_script("gpu.py", tmp_path, *arguments)
    check_gpu(result["results"][0], result["matrix_flops"])
    assert result["matrix_flops"] > 1e9
    assert "MFU" in printed
    assert "losses differ by" in printed


@pytest.mark.deep
def test_gpu_benchmark_with_compiled_blocks(tmp_path: Path) -> None:
    result, _ = run_script("gpu.py", tmp_path, "--device", "cpu", "--quick")
    check_gpu(result["results"][0], result["matrix_flops"])
    assert "compiled" in result["results"][0]["plan"]


@pytest.mark.deep
def test_the_price_of_switches_is_measured_on_any_device(tmp_path: Path) -> None:
    result, printed = run_script("costs/gpu_switches.py", tmp_path, "--device", "cpu", "--quick")
    losses = {name: took["losses"] for name, took in result["steps"].items()}
    assert losses["plain"] == losses["plain again"] == losses["deterministic"], "on a CPU no switch changes a number"
    assert losses["fp32"] == losses["fp32, tf32"] == losses["fp32 again"]
    assert not result["documents"]["kernel"] and result["documents"]["mask"]["seconds"] > 0
    assert "documents by kernel        not on this device" in printed


@pytest.mark.deep
def test_rows_of_one_device_are_priced_and_then_measured(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--quick", "--steps", "2", "--warm-up", "1")
    result, printed = run_script("grid/one_gpu.py", tmp_path, *arguments)
    assert result["scores"]["published"]["rows"] == len(result["rows"]) == 2 and not result["scores"]["probed"]
    for row in result["rows"]:
        assert row["measured"]["seconds"] > 0 and row["published"]["seconds"] > 0
        assert row["measured"]["bytes"] > 1e8 and f"| {row['name']} |" in printed


def test_memory_that_choices_keep_is_what_the_planner_says(tmp_path: Path) -> None:
    result, printed = run_script("costs/memory.py", tmp_path, "--quick")
    rows = {row["choice"]: row for row in result["rows"]}
    assert printed.count("\n| ") == len(rows) + 1
    for name, row in rows.items():
        assert row["kept"] == pytest.approx(row["forecast_kept"], abs=0.05), name
        # Products once forward and twice backward; recompute makes those of the blocks once more, and no others.
        repeats = name not in ("none", "selective", "none, activations on the host")
        assert 1 < row["computed"] <= 4 / 3 if repeats else row["computed"] == pytest.approx(1.0), name
    for part in (0.75, 0.5, 0.25):
        assert rows["full"]["kept"] <= rows[f"budget {part:g}"]["kept"] <= part
    assert rows["full"]["computed"] > rows["budget 0.5"]["computed"] > 1
    assert rows["none, activations on the host"]["kept"] < 0.03 > rows["full, activations on the host"]["kept"]


@pytest.mark.deep
def test_forecasts_of_a_few_layouts_are_scored_against_their_runs(tmp_path: Path) -> None:
    result, printed = run_script("forecast_grid.py", tmp_path, "--quick")
    assert not result["not_measured"] and {row["devices"] for row in result["rows"]} == {1, 2}
    assert {row["task"] for row in result["rows"]} == {"small decoder"}
    for row in result["rows"]:
        assert all(row[f"{kind}_seconds"] > 0 for kind in ("measured", "forecast", "learnt"))
        assert 0.5 < row["forecast_bytes"] / row["measured_bytes"] < 2
    whole = result["scores"]
    errors = [abs(row["forecast_seconds"] / row["measured_seconds"] - 1) for row in result["rows"]]
    assert whole["time_mape"] == pytest.approx(sum(errors) / len(errors)) and whole["regret_worst"] >= 0
    assert printed.count("\n| all | ") == 1


@pytest.mark.deep
def test_the_price_of_random_numbers(tmp_path: Path) -> None:
    result, printed = run_script("costs/randomness.py", tmp_path, "--quick")
    for row in result["rows"]:
        ratios = [spread for spread in row.values() if isinstance(spread, dict)]
        assert len(ratios) == 4 and all(0 < ratio["low"] <= ratio["median"] <= ratio["high"] for ratio in ratios)
    assert printed.count("\n| cpu |") == 4


@pytest.mark.deep
def test_costs_against_the_number_of_ranks(tmp_path: Path) -> None:
    """What a rank does and sends in a save like the last, and in a load, is the same at any number of ranks."""
    result, printed = run_script("scale.py", tmp_path, "--quick", "--ranks", "2")
    rows = {(row["what"], row["unit"]): row for row in result["simulated"]}
    for what, unit in (("sums of fingerprints of a save", "kB"), ("parts of the index that a load opens", "files")):
        assert len(set(rows[what, unit]["costs"].values())) == 1 and rows[what, unit]["exponent"] == 0
    assert abs(rows["the brief of a start", "kB"]["exponent"]) < 0.05
    assert rows["lengths and digests of files", "kB"]["exponent"] < 0.6, "of a list's ranks, and of lists"
    assert rows["what it hears for that plan", "kB"]["exponent"] < 0.4, "a round more for twice the ranks"
    assert set(rows["what it hears a look", "kB"]["costs"].values()) == {0.0}, "nobody tells of ranks that do well"
    real = {(row["what"], row["unit"]): row["costs"]["2"] for row in result["processes"]}
    for what in ("joining the world", "a step", "a check that copies agree", "a save like the last", "a load"):
        assert real[what, "ms of CPU"] > 0 and real[what, "s"] > 0
    assert printed.count("exponent |") == 2


@pytest.mark.deep
def test_a_world_that_connects_on_demand(tmp_path: Path) -> None:
    """Six ranks live with the connections that 257 would have; one is killed, and no other waits for it for ever."""
    result, printed = run_script("worlds/large_world.py", tmp_path, "6", "--on-demand-above", "4", "--limit", "200")
    assert all(row["ranks"] == 6 for what, row in list(result["parts"].items())[:-2]) and len(result["parts"]) == 14
    assert result["ends"] == {"killed": 1, "save ended, given up": 5}
    assert (result["failed"], result["late"]) == (0, [])
    assert any("a rank stopped answering" in says for says in result["says"]) and "| load | 6 |" in printed


@pytest.mark.deep
def test_ranks_that_are_late_are_not_said_to_have_failed(tmp_path: Path) -> None:
    """Those that the benchmark ends at its limit have peers whose connections then end: not an error of theirs."""
    out = tmp_path / "result.json"
    script = [sys.executable, SCRIPTS / "worlds/large_world.py", "6", "--limit", "0.5", "--json", out]
    done = run_patiently(script, 300, cwd=tmp_path)
    assert done.returncode == 1
    result = json.loads(out.read_text())
    assert len(result["late"]) == 6 and result["failed"] == 0 and sum(result["late at"].values()) == 6


@pytest.mark.deep
def test_what_checkpoints_cost(tmp_path: Path) -> None:
    result, printed = run_script("checkpoint_stall.py", tmp_path, "--quick", "--dir", str(tmp_path))
    assert all(run["stall_seconds"] > 0 for run in result["runs"].values())
    assert all(rate > 0 for rate in result["rates"].values())
    assert "| beside training |" in printed and "| load |" in printed
    (larger,) = result["larger"]
    assert larger["bytes"] > 1.9 * result["bytes"]
    small = result["small tensors"]
    assert small["tensors"] > 1 and small["bytes"] / small["tensors"] < 2**20 and " small tensors |" in printed
    for each in (result, larger, small):
        assert each["rates"]["save"] > each["rates"]["save_and_back"], "which has the reading back in it"


@pytest.mark.deep
def test_reading_samples_of_text(tmp_path: Path) -> None:
    result, printed = run_script("data.py", tmp_path, "--quick")
    parts = result["parts"]
    every = {name: row for part in parts.values() for name, row in part["rows"].items()}
    rows = {name: row for name, row in every.items() if "cpu" in row}
    assert rows["memory map and permutation"]["over_memory_map"] == 1.0
    apart = rows["Paceline, packed rows, documents apart"]
    assert 0 < apart["over_same"] < apart["over_memory_map"], "who tells documents apart writes more than the map"
    assert all(row["cpu"] > 0 and row["first"] > 0 for row in rows.values())
    assert rows["Paceline"]["cpu"] < rows["torch DataLoader, batched, a worker"]["cpu"], (
        "which pays for every batch sent"
    )
    assert 0.5 < rows["Paceline"]["near"] < 1.5
    assert all(row["waste"] < 0.01 for kind, row in parts["batches"]["rows"].items() if kind.startswith("packed"))
    assert set(parts["resume"]["rows"]) == {"plain", "packed", "bucketed", "mixed"}
    assert all(row["amplification"] >= 1 for row in parts["cold"]["rows"].values())
    assert printed.count("| Paceline") == 9
    absent = [row["not_measured"] for row in every.values() if "not_measured" in row]
    assert all(why == "not installed" for why in absent), "a reader that fails is no reader that is absent"


@pytest.mark.deep
def test_the_live_page_of_a_large_run(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra `dash` is not installed")
    result, printed = run_script("dash.py", tmp_path, "--quick")
    assert result["steps"] == 10_000 and result["journal_bytes"] > 5_000_000
    assert result["server_bytes"] < 300e6, "what a server of a large run may use is no matter of the machine's speed"
    assert result["answer_seconds"] > 0 and 0 < result["update_seconds"] <= result["slowest_update_seconds"]
    assert "| CPU of an open page |" in printed


def test_the_proof_before_training_is_timed(tmp_path: Path) -> None:
    # Anew, and no fork of a process that has torch: the figure is what processes take that import it.
    result, printed = run_script("proof.py", tmp_path, "--quick", PYTHONHASHSEED="1")
    (row,) = result["rows"]
    assert row["ran_as"] == "dp_shard=2"
    assert 0 < row["proof_seconds"]["median"] <= row["seconds"]["median"], "the proof is a part of the command"
    assert row["cpu_ratio"]["median"] > 1, "a proof imports torch too"
    assert printed.count("| the example |") == 1
