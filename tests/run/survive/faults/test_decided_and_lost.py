"""What a step has decided is on record, though a rank is lost before that and the step's duties are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runs import records_of
from storm import SURVIVES, Story, told
from survive_runs import training
from test_soak import RUN

STEPS, STEP = 9, 6
# No comparison is due after the step. An update is left out, among candidates that were chosen from, and one of two
# copies is lost before that is recorded.
NAN: dict[str, Any] = {"kind": "nan", "step": STEP, "rank": 1}
LOST: dict[str, Any] = {"kind": "kill", "step": STEP, "rank": 1, "phase": "update"}
SKIPS: dict[str, Any] = {**RUN, "check_every": "5 steps", "health": {**RUN["health"], "on_nonfinite": "skip"}}


def test_what_a_step_has_decided_is_on_record_though_its_duties_are_made_up(tmp_path: Path) -> None:
    """The choice among its candidates, and the update that was left out: both were forgotten with the world."""
    two = {"dp_replicate": 2}
    calm = Story("calm", two, [NAN], SKIPS, STEPS, task="selects")
    met = Story("met", two, [NAN, LOST], SKIPS, STEPS, how=SURVIVES, task="selects")
    ended = told(tmp_path, [calm, met], timeout=180)
    assert ended["calm"][-1].code == ended["met"][-1].code == 0, ended
    (recovery,) = records_of(tmp_path / "met", "recovery")
    assert (recovery["rung"], recovery["step"]) == ("reform", STEP), "the step itself is not made again"
    chosen = []
    for name in ("calm", "met"):
        left_out = [each for each in records_of(tmp_path / name, "decision") if each["what"] == "skip"]
        assert len(left_out) == 1 and f"step {STEP}:" in left_out[0]["because"]
        chosen.append([(each["step"], each["chosen"]) for each in records_of(tmp_path / name, "selection")])
    assert chosen[0] == chosen[1] and [step for step, _ in chosen[1]] == [*range(1, STEPS + 1)]


def test_samples_that_were_left_out_are_counted_once_though_duties_are_made_up(tmp_path: Path) -> None:
    run: Any = training(tmp_path / "run", 100)
    run.source.damaged = dict.fromkeys(range(run.source.samples), "a bad sector")
    for batch in run:
        run.step(batch)
        run._done_step -= 1  # a peer was lost in the duties of the step
        assert run._make_up()
        assert run._left_out.total() == batch.step * batch.samples
        if batch.step == 3:
            break
