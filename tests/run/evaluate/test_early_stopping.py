"""A run with metrics, a further set and early stopping, from its spec to its report, and what resuming it does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from runs import in_process, records_of, steps_of, write_corpus, write_spec
from tests_shared import plan_of

from paceline.report.build import write_report
from paceline.run.evaluate import best
from paceline.run.loop.resume import Progress
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import load_spec
from paceline.supervise.told.brief import Brief

STEPS, SEQ_LEN = 9, 16
EVALUATE = """
[task.evaluate]
metrics = ["accuracy", "bits_per_byte"]
metric = "accuracy"
patience = 2
min_delta = 0.9
sets = [{ name = "other", source = "other" }]
"""
SAMPLES = """
[task.samples]
prompts = ["12 plus"]
every = "4 steps"
tokens = 4
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a spec beside the corpus of its further set."""
    path, other = write_spec(tmp_path, tmp_path / "run", steps=STEPS), tmp_path / "other"
    other.mkdir()
    for text in sorted(write_corpus(tmp_path).glob("0*.txt")):
        (other / text.name).write_text(text.read_text())
    text = path.read_text().replace('evaluate_every = "none"', 'evaluate_every = "2 steps"')
    text = text.replace('checkpoint_every = "4 steps"', 'checkpoint_every = "none"\nevaluate_samples = 8')
    path.write_text(text + EVALUATE + SAMPLES)
    return path


def train(path: Path, *overrides: str) -> Training:
    spec = load_spec(path, ["run.checkpoints.save_best=true", *overrides])
    brief = Brief(plan_of(Layout(), 14), STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan,
                  PlannedRecord())  # fmt: skip
    training = Training(spec, brief, World(0, 1, 0, torch.device("cpu")), Path(spec.run.dir))
    for batch in training:
        training.step(batch)
    return training


def test_who_survives_a_world_judges_by_what_it_knows_as_by_the_journal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of a long run takes seconds to read, for which everybody would wait."""
    training = train(path)
    read = training._judge_of_record()
    assert list(read.values) == [2, 4, 6]
    monkeypatch.delattr(best, "values_on_record")
    monkeypatch.delattr(best, "was_stopped")
    assert training._judge_of_record(survives=True) == read
    training.progress = Progress(4, 4 * 14)
    assert list(training._judge_of_record(survives=True).values) == [2, 4], "it goes on before the last one"


def test_a_run_ends_early_as_complete_and_keeps_its_best(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = path.parent / "run"
    train(path)
    assert [step["step"] for step in steps_of(run_dir)] == [1, 2, 3, 4, 5, 6]
    evaluations = records_of(run_dir, "evaluation")
    assert [each["step"] for each in evaluations] == [2, 4, 6]
    assert all(set(each["metrics"]) == {"accuracy", "bits_per_byte"} for each in evaluations)
    assert evaluations[0]["sets"]["other"]["weight"] > 0
    assert "bits_per_byte" in evaluations[0]["sets"]["other"]["metrics"]
    assert [(each["step"], each["prompts"]) for each in records_of(run_dir, "written")] == [
        (4, ["12 plus"]),
        (6, ["12 plus"]),
    ]
    assert all(len(each["texts"][0]) <= 4 for each in records_of(run_dir, "written"))
    said = capsys.readouterr().out
    assert "held-out loss" in said and "held-out (other) loss" in said and "stop     early, after 6 steps" in said
    (early,) = [each for each in records_of(run_dir, "decision") if each["what"] == "early stopping"]
    assert (early["from"], early["to"]) == ("9 steps", "6 steps") and "accuracy" in early["because"]
    ended = records_of(run_dir, "run_ended")[-1]
    assert (ended["status"], ended["exit_code"]) == ("complete", 0)
    page = write_report(run_dir).read_text()
    assert "accuracy of held-out samples" in page and "early stopping" in page and "12 plus →" in page

    train(path)
    assert "ended early after step 6" in capsys.readouterr().out and len(steps_of(run_dir)) == 6
    exported = in_process("export", run_dir, path.parent / "weights", "--step", "best", "--json")
    accuracy = {each["step"]: each["metrics"]["accuracy"] for each in evaluations}
    best = max((2, 6), key=lambda step: (accuracy[step], step))
    assert json.loads(exported.stdout)["step"] == best, "4 was not saved"

    train(path, "task.evaluate.patience=3")
    assert [step["step"] for step in steps_of(run_dir)] == list(range(1, 9)), "it ends one evaluation later"
    told = [each["because"] for each in records_of(run_dir, "decision") if each["what"] == "resume"]
    assert any("task.evaluate.patience was 2 and is now 3" in each for each in told)
