"""A run is exported by a process beside it, and one whose tool is away ends as it would without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import paceline, wait_until, write_spec

from paceline.observe.exports.openmetrics import NAME


@pytest.mark.deep
def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, devices=2, plan="dp_replicate = 2", steps=20)
    ended = paceline("train", spec, "--set", "run.exports.openmetrics='127.0.0.1:0'")
    assert ended.returncode == 0, ended.stderr
    metrics = run_dir / "exports" / NAME
    wait_until(lambda: metrics.exists() and 'paceline_running{run="tiny"} 0' in metrics.read_text())
    assert 'paceline_step{run="tiny"} 20' in metrics.read_text()
    wait_until(lambda: json.loads((run_dir / "exports" / "file_sd.json").read_text()) == [])  # nothing is served now


@pytest.mark.deep
def test_a_tool_that_is_away_costs_the_run_nothing(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, tmp_path / "run", steps=12)
    (tmp_path / "run" / "exports" / NAME).mkdir(parents=True)  # the file cannot be replaced
    ended = paceline("train", spec, "--set", "run.exports.openmetrics='file'")
    assert ended.returncode == 0 and "exports  openmetrics takes nothing" in ended.stdout, ended.stdout
    (tmp_path / "run" / "exports" / NAME).rmdir()
    assert paceline("deliver", tmp_path / "run").returncode == 0
    assert 'paceline_step{run="tiny"} 12' in (tmp_path / "run" / "exports" / NAME).read_text()
