"""The first step of a call that resumes a run: what a machine does in it is survived, as in any other step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runs import records_of, steps_of
from storm import SURVIVES, Story, told
from test_soak import RUN

TWO, STEPS = {"dp_replicate": 2}, 10
ASKED: dict[str, Any] = {"kind": "signal", "whom": "supervisor", "step": 5, "rank": 0}
FIRST = [{"kind": "stop", "rank": 1, "step": step, "phase": "forward"} for step in (6, 7)]  # it is heard in one of them


def test_a_rank_that_stands_still_in_the_first_step_of_a_call_does_not_end_it(tmp_path: Path) -> None:
    """The run had made steps, and its next call ended with 137: "no step was made before it"."""
    story = Story("resumed", TWO, [ASKED, *FIRST], RUN, STEPS, how=SURVIVES)
    first, *rest = told(tmp_path, [story], timeout=90)["resumed"]
    assert first.code == 75 and [start.code for start in rest] == [0], (first, rest)
    hangs = [each for each in records_of(tmp_path / "resumed", "fault") if "hung" in each["what"]]
    assert [each["rank"] for each in hangs] == [1, 1]
    assert sorted({each["step"] for each in steps_of(tmp_path / "resumed")}) == [*range(1, STEPS + 1)]
