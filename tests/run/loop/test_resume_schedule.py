"""The learning rate goes on as if the run had never stopped, or the journal says what the task changed."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.checkpoint import find_latest, read_manifest
from paceline.errors import VerificationFailed
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.steps import counts
from paceline.spec.steps.update import ScheduleSpec
from paceline.supervise.told.brief import Brief
from paceline.task.optimizer.schedule import Course, learning_rate
from paceline.units import Amount

STEPS = 8


def start(run_dir: Path, stop: int, steps: int = STEPS, precision: str = "fp32", **changes: Any) -> list[float]:
    """Start the run, leave it after step `stop` with a checkpoint, and return the learning rates it used."""
    task = decoder_task(schedule=ScheduleSpec(warmup=Amount(2, "steps")), stop=Amount(steps, "steps"))
    spec = Spec(
        task=dataclasses.replace(task, **changes),
        cluster=ClusterSpec(learn=False),
        run=RunSpec(checkpoint_every=None, evaluate_every=None),
    )
    plan = plan_of(Layout(), precision=precision)
    brief = Brief(plan, steps, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    run = Training(spec, brief, World(0, 1, 0, torch.device("cpu")), run_dir)
    rates = []
    for batch in run:
        rates.append(run.step(batch).lr)
        if run.progress.step >= stop:
            run.save()
            break
    return rates


def notes(run_dir: Path) -> list[str]:
    return [record["because"] for record in read_journal(run_dir) if record.get("what") == "resume"]


def test_a_course_is_the_schedule() -> None:
    for kind in ("constant", "cosine", "linear", "wsd"):
        for step in range(1, 13):
            rate = learning_rate(ScheduleSpec(kind=kind, final=0.3), 2e-3, step, 10, 3, 4)
            assert Course(kind, 2e-3, 0.3, 10, 3, 4).at(step) == rate


def test_the_rate_goes_on_and_the_checkpoint_says_what_it_depends_on(tmp_path: Path) -> None:
    undisturbed = start(tmp_path / "one", stop=6)
    assert start(tmp_path / "two", stop=3) + start(tmp_path / "two", stop=6) == undisturbed
    assert len(set(undisturbed)) == 6
    newest = find_latest(tmp_path / "two" / "checkpoints")
    assert newest is not None
    written = read_manifest(newest).extra["schedule"]
    assert written == {"kind": "cosine", "peak": 3e-3, "final": 0.1, "steps": 8, "warmup": 2, "decay": 1}
    assert not [note for note in notes(tmp_path / "two") if "learning rate" in note]


def test_a_schedule_that_changes_with_the_same_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, stop=3)
    # As where the steps of a warm-up were counted for another number of devices.
    monkeypatch.setattr(counts, "in_steps", lambda amount, *_: 4 if amount == Amount(2, "steps") else None)
    with pytest.raises(VerificationFailed, match="learning rate of step 4 is") as raised:
        start(tmp_path, stop=6)
    assert "its warmup was 2 and is 4" in raised.value.because and raised.value.exit_code == 4


def test_a_task_that_changes_the_schedule_is_a_decision_on_record(tmp_path: Path) -> None:
    start(tmp_path, stop=3)
    start(tmp_path, stop=4, steps=16)
    (said,) = [note for note in notes(tmp_path) if "the learning rate of step" in note]
    assert said.startswith("the learning rate of step 4 is") and said.endswith("the task says so")


def test_a_longer_constant_schedule_changes_nothing(tmp_path: Path) -> None:
    constant = {"schedule": ScheduleSpec(kind="constant")}
    start(tmp_path, stop=3, **constant)
    start(tmp_path, stop=4, steps=16, **constant)
    assert not [note for note in notes(tmp_path) if "learning rate" in note]


def test_a_precision_that_changes_is_said_and_on_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where a machine was measured between two starts, and the plan chose bf16 then; `precision` pins it."""
    start(tmp_path, stop=2)
    start(tmp_path, stop=3)
    assert not [note for note in notes(tmp_path) if "precision" in note]
    capsys.readouterr()
    start(tmp_path, stop=4, precision="bf16")
    (said,) = [note for note in notes(tmp_path) if "precision" in note]
    assert said == "the plan's precision was fp32 and is now bf16: numbers round otherwise"
    assert f"resume   {said}" in capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_release_says_nothing_of_it_and_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.run.loop import resume

    save = resume.save_checkpoint

    def earlier(root: Path, step: int, tensors: Any, extra: dict[str, Any], **options: Any) -> Any:
        return save(root, step, tensors, {k: v for k, v in extra.items() if k != "schedule"}, **options)

    monkeypatch.setattr(resume, "save_checkpoint", earlier)
    start(tmp_path, stop=3)
    assert len(start(tmp_path, stop=5)) == 2
