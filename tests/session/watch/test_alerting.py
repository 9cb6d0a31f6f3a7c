"""Alerts of real runs: a rank that dies, one that hangs, and a run that is gone without a word."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from runs import environment, paceline, records_of, run_patiently, wait_until, write_spec

from paceline.patience import programs_per_core
from paceline.spec.journal.beside import read_beside
from paceline.spec.journal.watching import AlertRecord

FAULTS = """
[run.recovery]
reform = true
[run.health]
hang_minimum = "2 s"
[[run.faults.each]]
kind = "kill"
rank = 1
step = 7
[[run.faults.each]]
kind = "stop"
rank = 1
step = 14
[run.alerts]
no_step_minimum = "{minimum}"
[[run.alerts.sinks]]
kind = "file"
to = "$ALERTS_TO"
least = "info"
"""
NO_STEP_SECONDS = 0.6
LOOK_SECONDS = 0.5


def sent_to(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.deep
def test_a_dead_rank_and_one_that_hangs_wake_somebody_at_once(tmp_path: Path) -> None:
    run_dir, to = tmp_path / "run", tmp_path / "secret-place.jsonl"
    path = write_spec(tmp_path, run_dir, devices=2, steps=18)
    path.write_text(path.read_text() + FAULTS.format(minimum=f"{NO_STEP_SECONDS} s"))
    ran = paceline("train", path, env=environment(ALERTS_TO=str(to)))
    assert ran.returncode == 0, ran.stderr
    wait_until(lambda: any(each["rule"] == "finished" for each in sent_to(to)))
    found, load = list(read_beside(run_dir, AlertRecord)), programs_per_core()
    dead, hung = [each for each in found if each.rule == "rank_down" and each.state == "firing"]
    killed, _ = records_of(run_dir, "injected")
    assert "SIGKILL" in dead.title and dead.time - killed["struck"] < 3.0 * load  # type: ignore[operator]
    assert "hung" in hung.title
    (silent,) = [each for each in found if each.rule == "no_step" and each.state == "firing" and each.step == 13]
    assert silent.evidence["silent_seconds"] < (silent.evidence["limit_seconds"] + 2 * LOOK_SECONDS) * 2 * load
    assert [each.state for each in found if each.rule == "rank_down"] == ["firing", "resolved"] * 2
    assert {"rank_down", "no_step", "finished"} <= {each["rule"] for each in sent_to(to)}
    texts = [path.read_text() for path in (run_dir / "journal").iterdir()] + [ran.stdout, ran.stderr]
    assert not [text for text in texts if str(to) in text], "what the variable holds is nowhere"


GONE = """
import os, signal, sys
from pathlib import Path
from paceline.session.watch.alerting import begin_alerts
from paceline.spec.load import parse_spec
from paceline.spec.journal.kinds import StepRecord
from paceline.spec.journal.beside import BesideFile
from paceline.spec.journal.line import line_of

spec = parse_spec(Path(sys.argv[1]).read_text())
alerts = begin_alerts(spec, print, supervises=False)
journal = Path(spec.run.dir) / "journal"
journal.mkdir(parents=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_gone_without_a_word_still_alerts(tmp_path: Path) -> None:
    run_dir, to = tmp_path / "run", tmp_path / "sent.jsonl"
    spec = tmp_path / "spec.toml"
    spec.write_text(
        textwrap.dedent(f"""
        [run]
        dir = "{run_dir}"
        [[run.alerts.sinks]]
        kind = "file"
        to = "{to}"
    """)
    )
    ran = run_patiently([sys.executable, "-c", GONE, spec], env=environment())
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    wait_until(lambda: bool(sent_to(to)))
    (alert,) = sent_to(to)
    assert (alert["rule"], alert["severity"]) == ("rank_down", "critical") and "is gone" in alert["title"]
    assert (run_dir / "journal" / "alerts-0001.jsonl").exists()
