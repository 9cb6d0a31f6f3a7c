"""A resume that is not the run it goes on with stops at its first step, with the first quantity that differs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.errors import VerificationFailed
from paceline.run import initial
from paceline.run.loop import under_plan
from paceline.run.loop.resume import Progress
from paceline.run.loop.step import StepStats
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.run.survive.replay import (
    TOLERANCES,
    StepBefore,
    expected_step,
    hold_against,
    relative,
    rounding_of,
)
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal, starts_of
from paceline.spec.layout import Layout
from paceline.spec.load import Spec, spec_to_dict
from paceline.spec.run import RunSpec
from paceline.spec.task import ModelSpec
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

STEPS, SAVED, KILLED = 8, 4, 6  # a run of so many steps, saved after the fourth, killed after the sixth


def begin(run_dir: Path, precision: str = "fp32", **run: Any) -> Training:
    """Return a start of the run."""
    options = {"checkpoint_every": Amount(SAVED, "steps"), "evaluate_every": None, "record_samples": True, **run}
    spec = Spec(
        task=decoder_task(stop=Amount(STEPS, "steps")), cluster=ClusterSpec(learn=False), run=RunSpec(**options)
    )
    plan = plan_of(Layout(), precision=precision)
    brief = Brief(plan, STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    return Training(spec, brief, World(0, 1, 0, torch.device("cpu")), run_dir)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run whose journal goes two steps beyond its checkpoint."""
    training = begin(tmp_path)
    for batch in training:
        training.step(batch)
        if training.progress.step == KILLED:
            break
    return tmp_path


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_journal(run_dir) if record["kind"] == kind]


def go_on(training: Training) -> None:
    for batch in training:
        training.step(batch)


def test_the_same_step_is_found_bit_for_bit(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go_on(begin(killed))
    (record,) = records(killed, "replay")
    assert record["step"] == SAVED + 1 and record["of_attempt"] == 1
    assert record["differences"] == {"loss": 0.0, "grad_norm": 0.0}
    assert "step 5 made again, bit for bit the same" in capsys.readouterr().out


def test_a_run_that_goes_on_draws_no_weights_that_it_loads_over(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing takes seconds of a large model, and a recovery would wait. Where nothing is loaded they are drawn."""
    drawn, fill = list[object](), initial.fill_weights

    def counted(model: object, spec: ModelSpec, seed: int) -> None:
        drawn.append(spec)
        fill(model, spec, seed)  # type: ignore[arg-type]

    monkeypatch.setattr(initial, "fill_weights", counted)
    monkeypatch.setattr(under_plan, "fill_weights", counted)
    go_on(begin(killed))
    assert not drawn and records(killed, "replay")[-1]["differences"] == {"loss": 0.0, "grad_norm": 0.0}
    fresh = tmp_path / "fresh"
    (fresh / "checkpoints" / "of-somebody").mkdir(parents=True)
    (fresh / "checkpoints" / "of-somebody" / "manifest.json").touch()
    go_on(begin(fresh))
    assert len(drawn) == 1
    first = [next(each for each in records(run, "step") if each["step"] == 1) for run in (fresh, killed)]
    assert first[0]["loss"] == first[1]["loss"] and first[0]["grad_norm"] == first[1]["grad_norm"]


def test_duties_that_are_made_up_for_are_not_held_to_the_step_after_theirs(killed: Path) -> None:
    """A rank was lost in the duties of a step, and the journal of an earlier world goes on after it: that ended the run
    as one that does not do what it did."""
    training = begin(killed)
    told = next(each for each in records(killed, "step") if each["step"] == SAVED)
    known = {each.name: told[each.name] for each in dataclasses.fields(StepStats) if told.get(each.name) is not None}
    training._made = StepStats(**{**known, "updated": True, "stop_requested": False})
    training._done_step = SAVED - 1  # as in a world that is formed anew
    assert training._make_up() and training._done_step == SAVED
    go_on(training)
    (record,) = records(killed, "replay")
    assert record["step"] == SAVED + 1 and record["differences"] == {"loss": 0.0, "grad_norm": 0.0}


def test_weights_that_are_not_those_of_the_checkpoint_stop_the_run(killed: Path) -> None:
    training = begin(killed)
    with torch.no_grad():
        next(training.model.parameters()).mul_(1.01)
    with pytest.raises(VerificationFailed, match=r"step 5 is not the one that start 1") as stopped:
        go_on(training)
    assert stopped.value.because.startswith("its loss was") and stopped.value.exit_code == 4
    assert records(killed, "run_ended")[-1]["exit_code"] == 4
    assert [record["step"] for record in records(killed, "checkpoint")] == [SAVED], "nothing of it was saved"


def test_an_update_that_is_another_one_stops_the_run_at_the_step_after(killed: Path) -> None:
    """The first step follows from weights and samples alone: changed code of an optimizer went on in silence."""
    training = begin(killed)
    for group in training.optimizer.param_groups:
        group["betas"] = (0.5, 0.5)
    with pytest.raises(VerificationFailed, match=r"step 6 is not the one that start 1") as stopped:
        go_on(training)
    assert f"step {SAVED + 1} was the same, and so its update is another one" in stopped.value.because


def test_an_update_that_is_meant_to_be_another_one_is_not_held_to(killed: Path) -> None:
    training, decayed = begin(killed), begin(killed).spec.task.optimizer
    spec = spec_to_dict(training.spec)
    asked = killed, Progress(SAVED, SAVED * 13), training.brief.plan, [False, False], None
    known, meant = expected_step(*asked, spec), {**spec, "task": {**spec["task"], "optimizer": {"lr": decayed.lr * 2}}}
    assert known is not None and known.following is not None and known.following.step == KILLED
    changed = expected_step(*asked, meant)
    assert changed is not None and changed.following is None


def test_other_samples_stop_the_run_by_their_place(killed: Path) -> None:
    _, journal = starts_of(killed)[0]
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    step = next(line for line in lines if line["kind"] == "step" and line["step"] == SAVED + 1)
    step["sample_ids"][1] += 1
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(VerificationFailed) as stopped:
        go_on(begin(killed))
    assert f"the sample at position {step['position_before'] + 1} is another one" in stopped.value.because


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16"}, {"tf32": True}, {"replay": False}], ids=["precision", "tf32", "off"]
)
def test_nothing_is_held_to_a_step_that_is_to_round_otherwise(killed: Path, changes: dict[str, Any]) -> None:
    begun = begin(killed, **changes)
    try:
        go_on(begun)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert records(killed, "replay") == [] and begun.progress.step == STEPS


def test_a_run_that_stopped_at_its_checkpoint_has_nothing_to_hold_to(tmp_path: Path) -> None:
    training = begin(tmp_path)
    for batch in training:
        training.step(batch)
        if training.progress.step == SAVED:
            break
    go_on(begin(tmp_path))
    assert records(tmp_path, "replay") == []


def test_a_step_of_an_older_start_counts_and_long_journals_are_read_from_their_ends(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start between has no step. With a small window, the journals are read in several goes."""
    begin(killed).take_down()
    monkeypatch.setattr("paceline.spec.journal.reading.TAIL_BYTES", 400)
    parsed = []
    whole = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(text) or whole(text, **options))
    found = expected_step(killed, Progress(KILLED - 1, 40), plan_of(Layout()), [False, False])
    assert found is not None and (found.step, found.attempt) == (KILLED, 1)
    assert not any(b'"step": 1,' in text for text in parsed if isinstance(text, bytes)), "the beginning is left alone"
    assert expected_step(killed, Progress(KILLED, 48), plan_of(Layout()), [False, False]) is None


def test_a_step_that_was_rolled_back_later_is_not_held_to(killed: Path) -> None:
    _, journal = starts_of(killed)[-1]
    with journal.open("a") as file:
        file.write(json.dumps({"kind": "decision", "what": "rollback"}) + "\n")
    assert expected_step(killed, Progress(SAVED, 32), plan_of(Layout()), [False, False]) is None


STATS = StepStats(5, 32, 40, loss=2.5, weight=8.0, grad_norm=1.5, lr=1e-3, seconds={}, updated=True,
                  stop_requested=False)  # fmt: skip
THEN = StepBefore(5, 32, 40, 2.5, 1.5, 3, (1, 2))


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (lambda stats: dataclasses.replace(stats, position_before=31), "position 32 to 40, and are 31"),
        (lambda stats: dataclasses.replace(stats, loss=2.5 * (1 + 3e-4)), "its loss was 2.5"),
        (lambda stats: dataclasses.replace(stats, loss=math.nan), "its loss was 2.5 and is nan"),
        (lambda stats: dataclasses.replace(stats, grad_norm=1.5 * (1 + 3e-3)), "its grad_norm was 1.5"),
    ],
)
def test_the_first_quantity_that_differs_is_named(change: Callable[[StepStats], StepStats], because: str) -> None:
    assert hold_against(THEN, STATS, [1, 2], "fp32").differences == {"loss": 0.0, "grad_norm": 0.0}
    with pytest.raises(VerificationFailed) as stopped:
        hold_against(THEN, change(STATS), [1, 2], "fp32")
    assert because in stopped.value.because


def test_rounding_of_another_layout_is_no_other_step() -> None:
    near = dataclasses.replace(STATS, loss=2.5 * (1 + 1e-6), grad_norm=1.5 * (1 - 1e-6))
    found = hold_against(THEN, near, None, "fp32").differences
    assert found["loss"] == pytest.approx(1e-6, rel=1e-3)
    with pytest.raises(VerificationFailed):
        hold_against(THEN, near, None, "fp64")
    assert relative(math.inf, math.inf) == 0.0 and relative(math.nan, math.nan) == 0.0
    assert relative(math.inf, -math.inf) == math.inf or math.isnan(relative(math.inf, -math.inf))


def test_a_program_of_others_may_compute_parts_in_fp32() -> None:
    ours, theirs = ModelSpec("llama-1m"), ModelSpec("mamba:factory")
    assert [rounding_of(each, ours) for each in TOLERANCES["loss"]] == list(TOLERANCES["loss"])
    assert [rounding_of(each, theirs) for each in ("fp64", "fp32", "bf16")] == ["fp32", "fp32", "bf16"]
    assert rounding_of("fp64", torch.nn.Linear(1, 1)) == "fp32"
