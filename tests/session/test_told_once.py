"""What stands out of training is told once: when it does, and not again by the lines that close the run."""

from __future__ import annotations

import errno
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import report_journals as journals
from runs import in_process, write_spec

from paceline.session.closing import say_report


def test_what_stood_out_of_training_is_not_repeated_at_the_end_of_the_run(tmp_path: Path) -> None:
    """A rate that moves weights by more than their norm stands out in the third step that is measured."""
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, steps=6)
    done = in_process("train", spec, "--set=task.optimizer.lr=3", "--set=run.observe.health_every=1 steps")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("health ")]
    assert any("large update" in line for line in told)
    assert len(told) == len(set(told)), "each is told once"
    closing = done.stdout[done.stdout.index("report  ") :]
    assert "health " not in closing
    asked = in_process("report", run_dir)
    assert "health   large update" in asked.stdout, "whoever asks for the report is told"


def test_what_a_run_came_to_is_said_though_the_disk_does_not_take_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all was said: neither that there is no page, nor what would have stood there."""
    run_dir = journals.write(tmp_path, journals.complete())
    said: list[str] = []
    say_report(run_dir, said.append)
    (run_dir / "report.html").unlink()
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", Mock(side_effect=full))
    without: list[str] = []
    say_report(run_dir, without.append)
    assert without[0].startswith(f"report   cannot write {run_dir}/report.html: ") and "No space left" in without[0]
    assert without[0].partition("      ")[2] == said[0].partition("      ")[2] and without[1:] == said[1:]


def test_a_report_of_another_version_than_runs_is_told_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is imported when a run is over, which may be weeks after the rest: the package may be another then."""
    monkeypatch.setitem(sys.modules, "paceline.report.build", None)
    said: list[str] = []
    say_report(tmp_path, said.append)
    assert len(said) == 1 and said[0].startswith("report   not made: ") and f"paceline report {tmp_path}" in said[0]
