"""Whole runs with shared sequences: the samples that are read, and going on in another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from rounding import assert_curves_close
from runs import paceline, records_of, steps_of, write_spec

PACKED = "task.data.cross_documents=false"


def trained(folder: Path, run_dir: Path, devices: int, plan: str, steps: int) -> Path:
    spec = write_spec(folder, run_dir, devices, plan, steps, precision="fp64")
    options = ["--set", PACKED, "--set", "run.evaluate_every=4 steps"]
    ended = paceline("train", spec, *options)
    assert ended.returncode == 0, ended.stderr
    return run_dir


@pytest.mark.deep
def test_runs_go_on_between_one_device_and_shared_sequences(tmp_path: Path) -> None:
    alone = trained(tmp_path, tmp_path / "alone", 1, "", 12)
    moved = trained(tmp_path, tmp_path / "moved", 2, 'cp = 2\ncp_method = "ring"', 4)
    trained(tmp_path, moved, 1, "", 8)
    trained(tmp_path, moved, 2, "cp = 2\nmicro_batch = 3", 12)
    ours, theirs = steps_of(moved), steps_of(alone)
    assert [step["sample_ids"] for step in ours] == [step["sample_ids"] for step in theirs]
    for quantity in ("loss", "grad_norm"):
        assert_curves_close([s[quantity] for s in ours], [s[quantity] for s in theirs])
    evaluated = [[record["loss"] for record in records_of(run, "evaluation")] for run in (moved, alone)]
    assert_curves_close(*evaluated)


@pytest.mark.deep
def test_another_experiment_is_refused_by_name(tmp_path: Path) -> None:
    run_dir = trained(tmp_path, tmp_path / "packed", 1, "", 4)
    ended = paceline("train", write_spec(tmp_path, run_dir, 1, "", 8, precision="fp64"))
    assert ended.returncode == 2 and "task.data.cross_documents" in ended.stderr
