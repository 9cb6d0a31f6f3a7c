"""Whatever asks a run to end, all of it takes one path: a checkpoint of the step, a decision that says why, and 75."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from survive_runs import here, records
from test_announced import served
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.checkpoint import list_checkpoints
from paceline.errors import Requeue
from paceline.run.loop.training import Training
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

LONG = 100_000  # steps: none of these runs comes to its end


def run_of(run_dir: Path, usd_per_second: float = math.nan, **run: Any) -> Training:
    """Return a run on one device that goes on for ever."""
    world, task = here(), decoder_task(stop=Amount(LONG, "steps"))
    brief = Brief(plan_of(Layout(), batch=6), LONG, SEQ_LEN, "tokens", "cpu", 1, 1.0, usd_per_second, 1.0, math.nan,
                  PlannedRecord())  # fmt: skip
    spec = RunSpec(checkpoint_every=None, evaluate_every=None, check_every=None)
    spec = dataclasses.replace(spec, **run)
    return Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=spec), brief, world, run_dir)


def ended_with_75(run: Training, run_dir: Path) -> str:
    """Train until the run is asked to end, hold how it ended, and return the reason on record."""
    with pytest.raises(Requeue):
        for batch in run:
            run.step(batch)
    last = records(run_dir, "step")[-1]["step"]
    (stop,) = (each for each in records(run_dir, "decision") if each["what"] == "stop")
    (end,) = records(run_dir, "run_ended")
    assert (end["status"], end["exit_code"], end["step"]) == ("requeue", 75, last)
    assert [each.manifest.step for each in list_checkpoints(run_dir / "checkpoints").complete] == [last]
    return str(stop["because"])


def test_limits_of_time_and_of_money_save_and_end_with_75(tmp_path: Path) -> None:
    assert "time limit" in ended_with_75(run_of(tmp_path / "time", time_limit="50 ms"), tmp_path / "time")
    paid = run_of(tmp_path / "money", 1.0, usd_limit=0.05)
    assert "money limit of $0.05" in ended_with_75(paid, tmp_path / "money")


def test_a_notice_by_a_file_or_a_url_saves_and_ends_with_75(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("LOOK_SECONDS", "URL_SECONDS"):
        monkeypatch.setattr(f"paceline.run.survive.notice.{seconds}", 0.05)
    notice = tmp_path / "notice"
    by_file = run_of(tmp_path / "file", recovery=dataclasses.replace(RecoverySpec(), notice_file=str(notice)))
    notice.touch()
    assert str(notice) in ended_with_75(by_file, tmp_path / "file")
    with served(lambda method, path, headers: (200, "gone at noon")) as address:
        recovery = dataclasses.replace(RecoverySpec(), notice_url=f"{address}/notice")
        assert "gone at noon" in ended_with_75(run_of(tmp_path / "url", recovery=recovery), tmp_path / "url")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_ends_with_75(tmp_path: Path, number: signal.Signals) -> None:
    run = run_of(tmp_path)
    with pytest.raises(Requeue):
        for batch in run:
            stats = run.step(batch)
            if stats.step == 2:
                os.kill(os.getpid(), number)
    assert number.name in str([each["because"] for each in records(tmp_path, "decision") if each["what"] == "stop"])
    assert [each.manifest.step for each in list_checkpoints(tmp_path / "checkpoints").complete] == [3]


def test_checkpoints_of_a_run_go_by_their_age(tmp_path: Path) -> None:
    kept = {}
    for name, seconds in (("all", None), ("none", "1 ms")):
        run = run_of(tmp_path / name, checkpoint_every=Amount(2, "steps"), keep_last=9,
                     checkpoints=CheckpointsSpec(asynchronous="off", keep_for=seconds))  # fmt: skip
        for batch in run:
            if run.step(batch).step == 6:
                break
        listed = list_checkpoints(tmp_path / name / "checkpoints").complete
        kept[name] = [each.manifest.step for each in listed]
    assert kept == {"all": [6, 4, 2], "none": [6]}


def test_an_error_between_two_worlds_is_told_as_itself(tmp_path: Path) -> None:
    """Nothing of the plan before is left then, and the run was said to have failed for that ("attribute 'built'")."""
    run = run_of(tmp_path)
    loop = iter(run)
    run.step(next(loop))
    run.take_down()
    run.failed(LookupError("of the next world"))
    assert "of the next world" in records(tmp_path, "run_ended")[-1]["error"]["what"]
    del loop
