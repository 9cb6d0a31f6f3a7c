"""`Run` and `fit` of a spec file: its tables hold, and what is given beside the path stands in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import steps_of, write_spec

import paceline
from paceline.errors import ConfigError
from paceline.session.verbs.spec_given import spec_of
from paceline.spec.load import load_spec


def test_a_file_trains_from_python_as_on_the_command_line(tmp_path: Path) -> None:
    """The directory, the plan and the length are the file's; an override changes one option of it."""
    run = paceline.Run(write_spec(tmp_path, tmp_path / "run"), overrides=["task.stop=2 steps"])
    losses = [run.step(batch).loss for batch in run]
    assert [record["loss"] for record in steps_of(tmp_path / "run")] == losses and len(losses) == 2
    assert run.spec.path == tmp_path / "spec.toml" or run.spec.path is not None


def test_what_is_given_beside_a_file_stands_in_its_place(tmp_path: Path) -> None:
    path = write_spec(tmp_path, tmp_path / "run")
    file = load_spec(path)
    assert spec_of(path) == file
    given: dict[str, Any] = {"plan": "dp_shard=2", "cluster": 2, "run": {"dir": "other"}, "verify": True}
    changed = spec_of(path, **given)
    assert changed.plan.dp_shard == 2 and changed.plan.precision != file.plan.precision, "a whole table"
    assert (changed.cluster.devices, changed.run.dir, changed.run.verify) == (2, "other", True)
    assert changed.task == file.task and changed.path == file.path
    assert spec_of(path, verify=True).run.dir == file.run.dir, "one option of the table"


@pytest.mark.parametrize("verb", [paceline.Run, paceline.fit])
def test_what_is_no_spec_file_is_an_error_of_ours(tmp_path: Path, verb: Any) -> None:
    with pytest.raises(ConfigError, match=r"there is no file 'nowhere\.toml'"):
        verb("nowhere.toml")
    with pytest.raises(ConfigError, match="overrides without a spec file"):
        verb({"name": "a"}, overrides=["task.seed=3"])
    with pytest.raises(ConfigError, match=r"task\.seeed"):
        verb(write_spec(tmp_path, tmp_path / "run"), overrides=["task.seeed=3"])
