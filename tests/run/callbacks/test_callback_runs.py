"""Callbacks in whole runs: what they decide is done and on record, their state is resumed, their errors are told."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from callback_runs import run_with, through
from distributed import run_ranks
from runs import records_of, steps_of

from paceline.errors import ConfigError
from paceline.run.callbacks.moment import CallbackMoment
from paceline.spec.sync import Sync


class Conductor:
    """Leaves an update out, sets a rate, logs, and ends the run after five steps that it has counted."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.count = 0

    def on_start(self, moment: CallbackMoment) -> None:
        self.seen.append(f"start {moment.step}")

    def before_step(self, moment: CallbackMoment) -> dict[str, Any]:
        return {2: {"skip": "a bad batch"}, 3: {"lr": 0.5 * (moment.lr or 0.0)}}.get(moment.step, {})

    def after_step(self, moment: CallbackMoment) -> dict[str, Any]:
        assert moment.stats is not None and moment.stats.step == moment.step
        self.count += 1
        found: dict[str, Any] = {"log": {"count": self.count, "loss": moment.stats.loss}}
        return {**found, "stop": "five are enough"} if self.count == 5 else found

    def on_save(self, moment: CallbackMoment) -> None:
        self.seen.append(f"save {moment.step}")

    def on_end(self, moment: CallbackMoment) -> None:
        self.seen.append(f"end {moment.step}")

    def state(self) -> dict[str, int]:
        return {"count": self.count}

    def load(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_what_callbacks_decide_is_done_and_their_state_is_resumed(tmp_path: Path) -> None:
    first, second, third = Conductor(), Conductor(), Conductor()
    through(run_with(tmp_path, 3, first))
    through(run_with(tmp_path, 9, second))
    assert first.seen == ["start 0", "save 2", "save 3", "end 3"]
    assert second.seen == ["start 3", "save 4", "save 5", "end 5"], "five steps were counted over both starts"
    steps = steps_of(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert [step.get("updated") for step in steps] == [None, False, None, None, None]
    assert steps[2]["lr"] == pytest.approx(0.5 * steps[0]["lr"])
    logged = records_of(tmp_path, "logged")
    assert [each["values"]["count"] for each in logged] == [1.0, 2.0, 3.0, 4.0, 5.0]
    said = {each["what"]: each["because"] for each in records_of(tmp_path, "decision")}
    assert "five are enough" in said["stop by a callback"] and "a bad batch" in said["update"]
    assert records_of(tmp_path, "run_ended")[-1]["status"] == "complete"
    through(run_with(tmp_path, 9, third))
    assert third.seen == ["start 5", "end 5"] and len(steps_of(tmp_path)) == 5, "it stays ended"


def test_no_update_is_left_out_where_sums_keep_what_rounding_left_of_it(tmp_path: Path) -> None:
    """A gradient of 1e6 that a callback left out came back as one of -2432 in the step after it."""
    run = run_with(tmp_path, 3, Conductor())
    plan = dataclasses.replace(run.brief.plan, sync=Sync(wire="bf16"))
    run.brief = dataclasses.replace(run.brief, plan=plan)
    with pytest.raises(ConfigError, match="a callback leaves out the update of step 2, and"):
        through(run)


def test_a_run_that_nobody_uses_is_gone_at_once_with_its_lock(tmp_path: Path) -> None:
    gc.disable()
    try:
        run = run_with(tmp_path, 3, Conductor())
        through(run)
        there = weakref.ref(run)
        del run
        assert there() is None
    finally:
        gc.enable()


def fails_at_two(moment: CallbackMoment) -> None:
    if moment.step == 2:
        raise ValueError("a mistake of mine")


def test_an_error_of_a_callback_is_the_users_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a mistake of mine"):
        through(run_with(tmp_path, 4, fails_at_two))
    ended = records_of(tmp_path, "run_ended")[-1]
    assert ended["status"] == "failed" and "fails_at_two" in ended["error"]["traceback"]


def stops_at_three(moment: CallbackMoment) -> dict[str, Any] | None:
    weight = sum(float(each.to_local().sum()) for each in moment.model.parameters())  # type: ignore[operator]
    (total,) = moment.sum([weight])
    return {"stop": f"weights add up to {total:.3f}"} if moment.step == 3 else None


def on_two(folder: str) -> int:
    run = run_with(Path(folder), 6, stops_at_three)
    through(run)
    return run.progress.step


def test_ranks_stop_together(tmp_path: Path) -> None:
    assert run_ranks(on_two, 2, str(tmp_path)) == [3, 3]
    (stop,) = [each for each in records_of(tmp_path, "decision") if each["what"] == "stop by a callback"]
    assert "weights add up to" in stop["because"]
