"""The collector rests while `Run` is imported, plans and builds, and not while it supervises: a run may take weeks."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests_shared import decoder_task

import paceline
from paceline import Run
from paceline.run.loop import between_steps
from paceline.session import run as session_run
from paceline.supervise.told.place import Place
from paceline.units import Amount


@pytest.mark.parametrize("place", [None, Place(0, 2, 0, 2)], ids=["itself", "launcher"])
def test_whoever_supervises_collects_garbage(
    place: Place | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, bool] = {}

    def planned(*given: Any, **options: Any) -> Any:
        seen["plans"] = gc.isenabled()
        return SimpleNamespace(plan=SimpleNamespace(layout=SimpleNamespace(devices=2)))

    def supervises(*given: Any) -> None:
        seen["supervises"] = gc.isenabled()
        raise SystemExit(0)

    stand_ins = {
        "end_with_parent": lambda: None, "into_log": lambda: None, "end_with_own_code": lambda: True,
        "place_here": lambda environ: place, "take": lambda run_dir: None, "planned_brief": planned,
        "start_script_again": supervises, "attend_script": supervises,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(session_run, name, stand_in)
    with pytest.raises(SystemExit):
        Run(decoder_task(), run={"dir": str(tmp_path)})
    assert seen == ({"supervises": True} if place else {"plans": False, "supervises": True})


def test_a_name_that_is_there_costs_no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """`except paceline.PacelineError` in a loop looked through all that is young each time."""
    assert paceline.PacelineError.__name__ in paceline.__all__

    def collects() -> None:
        raise AssertionError

    monkeypatch.setattr(paceline, "collector_at_rest", collects)
    assert issubclass(paceline.PacelineError, Exception)


def test_what_a_start_leaves_is_collected_once_after_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[int] = []
    steps: list[int] = []
    stand_in = SimpleNamespace(isenabled=lambda: True, collect=lambda: collected.append(len(steps)))
    monkeypatch.setattr(between_steps, "gc", stand_in)
    cluster = {"devices": 1, "device": "cpu", "probe": False}
    task = dataclasses.replace(decoder_task(), stop=Amount(3, "steps"))
    run = Run(task, cluster=cluster, run={"dir": str(tmp_path / "run")})
    for batch in run:
        steps.append(batch.step)
        run.step(batch)
    assert steps == [1, 2, 3] and collected == [1]
