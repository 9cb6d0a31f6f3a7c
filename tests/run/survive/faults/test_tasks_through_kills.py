"""Whatever a task keeps between steps survives with it: killed three times, each ends as the run that met nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import records_of, steps_of
from storm import SURVIVES, Story, told
from tasks_of_storms import TASKS
from test_soak import RUN

from paceline.checkpoint import find_latest
from paceline.checkpoint.inspect.differ import compare_checkpoints

STEPS = 14
# In the middle of a step, between weights and optimizer's state, and in a save: of both ranks, and rank 0 among them.
KILLS: tuple[dict[str, Any], ...] = (
    {"kind": "kill", "step": 5, "rank": 1, "phase": "backward"},
    {"kind": "kill", "step": 7, "rank": 0, "phase": "update"},
    {"kind": "kill", "step": 10, "rank": 1, "phase": "save"},
)


def bits(number: float | str) -> str:
    """Return a number of the journal to its last bit; one that is none is text there."""
    return number.hex() if isinstance(number, float) else number


def stories(name: str) -> list[Story]:
    own = TASKS[name]
    run = {**RUN, "check_every": "5 steps", **own.run}
    calm, met = list(own.faults), [*own.faults, *KILLS]
    return [Story(f"{name} calm", dict(own.layout), calm, run, STEPS, task=name),
            Story(name, dict(own.layout), met, run, STEPS, how=SURVIVES, task=name)]  # fmt: skip


@pytest.mark.deep  # test_survivors_state.py has one of them
@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_is_killed_three_times_ends_as_if_it_had_not(tmp_path: Path, name: str) -> None:
    calm, met, ended = tmp_path / f"{name} calm", tmp_path / name, told(tmp_path, stories(name))
    assert [start.code for start in ended[f"{name} calm"]] == [0], ended[f"{name} calm"]
    assert ended[name][-1].code == 0, ended[name]
    struck = {record["fault"] for record in records_of(met, "injected")}
    assert len(struck) == len(TASKS[name].faults) + len(KILLS) and len(records_of(met, "recovery")) >= len(KILLS)
    for what in ("step", "sample_ids", "position_before"):
        assert [each[what] for each in steps_of(met)] == [each[what] for each in steps_of(calm)], what
    for what in ("loss", "lr", "grad_norm"):
        of_each = [[bits(each[what]) for each in steps_of(run)] for run in (calm, met)]
        assert of_each[0] == of_each[1], what
    evaluated = [{each["step"]: each["loss"] for each in records_of(run, "evaluation")} for run in (calm, met)]
    assert evaluated[0] == evaluated[1]
    ends = [records_of(run, "run_ended")[-1] for run in (calm, met)]
    assert ends[0]["step"] == ends[1]["step"] and ends[0]["status"] == ends[1]["status"]
    newest = [find_latest(run / "checkpoints") for run in (calm, met)]
    assert newest[0] and newest[1] and newest[0].name == newest[1].name
    assert compare_checkpoints(*newest).is_none, compare_checkpoints(*newest)
