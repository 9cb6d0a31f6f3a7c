"""A whole run of the command line whose copies meet every third step: resumed between two outer steps, and refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runs import paceline, records_of, steps_of, write_spec

PLAN = 'dp_replicate = 2\nsync = { kind = "outer", every = 3, lr = 0.7, momentum = 0.9 }'


@pytest.mark.deep
def test_a_run_goes_on_between_outer_steps_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    spec = write_spec(tmp_path, run, 2, PLAN, steps=9)
    assert paceline("train", spec).returncode == 0
    whole = [(step["loss"], step["grad_norm"]) for step in steps_of(run)]
    for later in ("step-00000008", "step-00000009"):
        shutil.rmtree(run / "checkpoints" / later)
    again = paceline("train", spec)
    assert again.returncode == 0, again.stderr
    assert records_of(run, "run_started")[-1]["resumed_from"] and records_of(run, "run_started")[-1]["step"] == 4
    assert [(step["loss"], step["grad_norm"]) for step in steps_of(run)] == whole and len(whole) == 9
    other = paceline("train", spec, "--set", "plan.sync.every=2", "--set", "task.stop=10 steps")
    assert other.returncode == 2 and "how copies are kept in step is a part of what the run computes" in other.stderr


def test_a_run_that_would_end_while_copies_differ_is_refused(tmp_path: Path) -> None:
    refused = paceline("train", write_spec(tmp_path, tmp_path / "run", 2, PLAN, steps=10))
    assert refused.returncode == 2 and "10 is no multiple of 3" in refused.stderr
