"""A run as it is by default: samples of its node, measurements of its blocks and a log, in the places that are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import in_process, write_spec

from paceline.cli.main import main
from paceline.spec.journal.reading import read_kind, read_nodes
from paceline.spec.journal.watching import HealthSample


def test_a_run_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "watched"
    spec = write_spec(tmp_path, run_dir, steps=8)
    more = ["--set", 'run.observe.every="10 ms"', "--set", 'run.observe.health_every="4 steps"']
    done = in_process("train", spec, *more)
    assert done.returncode == 0, done.stderr
    samples = list(read_nodes(run_dir))
    assert samples and samples[-1].ranks == (0,) and (samples[-1].step or 0) <= 8
    assert samples[-1].signals["resident_bytes"]["max"] > 1 << 20 and samples[-1].attempt == 1
    measured = list(read_kind(run_dir, HealthSample))
    assert [each.step for each in measured] == [4, 8] and measured[0].told == ()
    assert {"grad_norm", "update_ratio", "activation_rms"} <= set(measured[0].values["layers.0"])
    assert main(["logs", str(run_dir), "--json"]) == 0
    told = [line["text"] for line in json.loads(capsys.readouterr().out)["lines"]]
    assert len([text for text in told if text.startswith("step ")]) == 8
    assert all(text in done.stdout for text in told)
    assert "GiB resident in the largest rank" in (run_dir / "report.html").read_text()


def test_everything_can_be_left_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "plain"
    off = [word for name in ("samples", "health", "logs") for word in ("--set", f"run.observe.{name}=false")]
    more = ["--set", 'run.observe.every="10 ms"', "--set", 'run.observe.health_every="1 steps"']
    assert in_process("train", write_spec(tmp_path, run_dir, steps=4), *off, *more).returncode == 0
    assert list(read_nodes(run_dir)) == list(read_kind(run_dir, HealthSample)) == []
    assert not (run_dir / "logs").exists()
