"""Ranks that hang in a step, with the limits of the defaults: found by what they do not do, and survived."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import records_of, steps_of
from storm import SURVIVES, Story, told

from paceline.spec.survive.health import HealthSpec

TWO, STEPS = {"dp_shard": 2}, 9
HANGS = {
    "stopped": {"kind": "stop", "rank": 1, "step": 6, "phase": "forward"},
    "sleeps": {"kind": "delay", "rank": 1, "step": 6, "seconds": "2 h"},
}
WORDS = {"stopped": "is stopped by a signal", "sleeps": "is the limit of one that does nothing, as the system tells"}


@pytest.mark.parametrize("name", HANGS)
def test_a_rank_that_does_nothing_is_found_in_seconds_and_no_step_is_lost(tmp_path: Path, name: str) -> None:
    stories = [
        Story("calm", TWO, steps=STEPS, how=SURVIVES),
        Story(name, TWO, [HANGS[name]], steps=STEPS, how=SURVIVES),
    ]
    assert [start.code for starts in told(tmp_path, stories, 200).values() for start in starts] == [0, 0]
    still = HealthSpec().hang_still
    (fault,), (recovery,) = records_of(tmp_path / name, "fault"), records_of(tmp_path / name, "recovery")
    assert fault["rank"] == 1 and "rank 1 of 2 hung" in fault["what"] and WORDS[name] in fault["because"]
    assert still <= fault["evidence"]["limit_seconds"] < HealthSpec().hang_minimum, "on a loaded machine by the steps"
    assert recovery["seconds"]["detect"] >= still, "since the rank stood still, and not since it was ended"
    losses = {step["step"]: step["loss"].hex() for step in steps_of(tmp_path / name)}
    assert losses == {step["step"]: step["loss"].hex() for step in steps_of(tmp_path / "calm")}
