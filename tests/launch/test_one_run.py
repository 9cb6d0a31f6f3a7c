"""Two `paceline train` in one run directory: the second is refused, or the first writes nothing more."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ending, environment, paceline, records_of, start, wait_for_step, wait_until, write_spec
from started.popen import Warm

from paceline.lock import take
from paceline.lock_file import NAME


def journals(run_dir: Path) -> list[str]:
    names = [path.name for path in (run_dir / "journal").iterdir()]
    return sorted(name for name in names if name[0].isdigit())  # not of what watches the run: a busy machine has alerts


LAYOUTS = [(1, ""), pytest.param(2, "dp_shard = 2", marks=pytest.mark.deep)]


@pytest.mark.parametrize(("devices", "plan"), LAYOUTS)
def test_a_second_run_ends_at_once_and_touches_nothing(tmp_path: Path, devices: int, plan: str) -> None:
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, devices, plan, steps=1_000_000)
    first = start("train", spec, "--set", "run.keep_last=1000000")
    try:
        wait_for_step(run_dir, 5, first)
        wait_until(lambda: bool(records_of(run_dir, "checkpoint")))  # it is written beside the steps
        manifest = run_dir / "checkpoints" / "step-00000004" / "manifest.json"
        saved = manifest.read_bytes()
        second = paceline("train", spec, "--set", "run.keep_last=1", "--set", "run.checkpoint_every=1 steps")
        assert second.returncode == 74, second.stderr
        assert "is in use by another run" in second.stderr and "Traceback" not in second.stderr
        assert f"process {first.pid} on " in second.stderr and "\n  try      " in second.stderr
        assert second.stdout == "", "nothing is planned, proved or reported"
        assert journals(run_dir) == ["0001.jsonl"] and not (run_dir / "report.html").exists()
        told = paceline("train", spec, "--json")
        assert json.loads(told.stdout)["error"] == "RunInUse" and told.returncode == 74
        assert manifest.read_bytes() == saved
    finally:
        first.send_signal(signal.SIGTERM)
        _, stderr = ending(first, 60)
    assert first.returncode == 75, stderr
    assert [each["what"] for each in records_of(run_dir, "decision") if each["attempt"] > 1] == []
    stopped_at = records_of(run_dir, "run_ended")[-1]["step"]
    again = paceline("train", spec, "--steps", stopped_at + 2)
    assert again.returncode == 0, again.stderr
    assert records_of(run_dir, "run_started")[-1]["step"] == stopped_at
    assert journals(run_dir) == ["0001.jsonl", "0002.jsonl"]


def test_ranks_of_a_launcher_are_refused_together(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with take(run_dir):
        spec = write_spec(tmp_path, run_dir, 2, "dp_shard = 2")
        shared = environment(WORLD_SIZE="2", MASTER_ADDR="localhost", PACELINE_RENDEZVOUS=f"file://{tmp_path}/meet",
                             GLOO_SOCKET_IFNAME="lo")  # fmt: skip
        ranks = [
            Warm(
                [sys.executable, "-m", "paceline", "train", str(spec)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip
        for process in ranks:
            _, stderr = ending(process, 60)
            assert process.returncode == 74, stderr
            assert "is in use by another run" in stderr and "Traceback" not in stderr
        assert [path.name for path in run_dir.iterdir()] == [NAME]
    assert not run_dir.exists(), "nobody has kept anything in it"


@pytest.mark.deep
@pytest.mark.parametrize(("devices", "plan"), LAYOUTS)
def test_a_run_that_was_taken_over_writes_nothing_more(tmp_path: Path, devices: int, plan: str) -> None:
    """The lock's file is deleted under a run, and another begins: the older one ends, and leaves the newer's alone."""
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, devices, plan, steps=1_000_000)
    first = start("train", spec, "--set", "run.checkpoint_every=none")
    wait_for_step(run_dir, 3, first)
    (run_dir / NAME).unlink()
    second = paceline("train", spec, "--steps", "6")
    _, stderr = ending(first, 60)
    assert first.returncode == 74 and "has taken over" in stderr and "Traceback" not in stderr
    assert second.returncode == 0, second.stderr
    ends = records_of(run_dir, "run_ended")
    assert [(end["attempt"], end["status"], end["step"]) for end in ends] == [(2, "complete", 6)]
    assert not records_of(run_dir, "fault")
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
