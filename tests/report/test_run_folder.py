"""A run's directory, read from Python: records, spec, report, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import report_journals as journals

from paceline import load_run, report
from paceline.errors import ConfigError, StorageError


def test_a_run_is_read_and_reported(tmp_path: Path) -> None:
    journals.write(tmp_path, journals.complete())
    run = load_run(str(tmp_path))
    assert run.records()[0]["kind"] == "run_started" and len(run.records("step")) == 300
    assert not (tmp_path / "report.html").exists() and run.summary().steps_done == 300
    assert report(tmp_path) == run.summary()
    assert "<html" in (tmp_path / "report.html").read_text()


def test_what_is_no_run_is_refused_and_one_that_is_near_is_named(tmp_path: Path) -> None:
    journals.write(tmp_path / "run-1", journals.one_step())
    with pytest.raises(ConfigError, match="not a run's directory") as refused:
        load_run(tmp_path / "run-2")
    assert "run-1" in refused.value.try_
    with pytest.raises(ConfigError, match="no checkpoints"):
        load_run(tmp_path / "run-1").checkpoint()
    (tmp_path / "run-3" / "journal").mkdir(parents=True)
    with pytest.raises(StorageError, match="tells no spec"):
        load_run(tmp_path / "run-3").spec  # noqa: B018
