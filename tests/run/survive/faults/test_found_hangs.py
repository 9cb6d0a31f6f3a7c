"""Ranks that hang in a step, with the limits of the defaults: found by what they do not do, and survived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import records_of, steps_of
from storm import SURVIVES, Story, told

from paceline.spec.survive.health import HealthSpec

TWO, STEPS = {"dp_shard": 2}, 9
STOPS: dict[str, Any] = {"kind": "stop", "rank": 1, "step": 6, "phase": "forward"}
STORIES = {  # one of them has a task of its own, which is held against itself as it goes on
    "stopped": ([STOPS], "", "is stopped by a signal"),
    "locked": ([], "locks up", "is the limit of one that does nothing, as the system tells"),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_rank_that_does_nothing_is_found_in_seconds_and_no_step_is_lost(tmp_path: Path, name: str) -> None:
    faults, task, word = STORIES[name]
    calm, met = tmp_path / "calm", tmp_path / "met"
    for folder in (calm, met):
        folder.mkdir()
    (calm / "mark").touch()  # which keeps the task from it
    ended = told(calm, [Story("calm", TWO, steps=STEPS, how=SURVIVES, task=task)], 200)
    ended |= told(met, [Story(name, TWO, faults, steps=STEPS, how=SURVIVES, task=task)], 200)
    assert [start.code for starts in ended.values() for start in starts] == [0, 0]
    health = HealthSpec()
    still = health.hang_still
    (fault,), (recovery,) = records_of(met / name, "fault"), records_of(met / name, "recovery")
    assert fault["rank"] == 1 and "rank 1 of 2 hung" in fault["what"] and word in fault["because"]
    limit, of_steps = fault["evidence"]["limit_seconds"], health.hang_factor * fault["evidence"]["median_step_seconds"]
    assert still <= limit < max(health.hang_minimum, of_steps + 0.01), "where steps take seconds, by the steps"
    assert recovery["seconds"]["detect"] >= still, "since the rank stood still, and not since it was ended"
    losses = {step["step"]: step["loss"].hex() for step in steps_of(met / name)}
    assert losses == {step["step"]: step["loss"].hex() for step in steps_of(calm / "calm")}
