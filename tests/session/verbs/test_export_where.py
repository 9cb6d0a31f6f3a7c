"""Weights are exported into a folder of their own, and not among the files of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.session.verbs.weights import export_run


def test_a_runs_directory_takes_no_exported_weights(tmp_path: Path) -> None:
    """Not its own, and not another run's: its files are told from theirs by nothing."""
    for name in ("own", "other"):
        (tmp_path / name / "journal").mkdir(parents=True)
    for out in ("own", "other"):
        with pytest.raises(ConfigError) as refused:
            export_run(tmp_path / "own", tmp_path / out)
        assert "it is a run's directory" in str(refused.value) and f"{out}-weights" in refused.value.try_
        assert [each.name for each in (tmp_path / out).iterdir()] == ["journal"]
