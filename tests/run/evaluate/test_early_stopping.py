"""A run with metrics, a further set and early stopping, from its spec to its report, and what resuming it does."""

from __future__ import annotations

import json
from pathlib import Path

from runs import environment, in_process, paceline, records_of, steps_of, write_corpus, write_spec

EVALUATE = """
[task.evaluate]
metrics = ["accuracy", "bits_per_byte"]
metric = "accuracy"
patience = 2
min_delta = 0.9
sets = [{ name = "other", source = "other" }]
"""


def test_a_run_ends_early_as_complete_and_keeps_its_best(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    path = write_spec(tmp_path, run_dir, steps=9)
    other = tmp_path / "other"
    other.mkdir()
    for text in sorted(write_corpus(tmp_path).glob("0*.txt")):
        (other / text.name).write_text(text.read_text())
    text = path.read_text().replace('evaluate_every = "none"', 'evaluate_every = "2 steps"')
    path.write_text(text.replace('checkpoint_every = "4 steps"', 'checkpoint_every = "none"') + EVALUATE)
    train = ["train", path, "--set", "run.checkpoints.save_best=true"]
    ran = paceline(*train)
    assert ran.returncode == 0, ran.stderr
    assert [step["step"] for step in steps_of(run_dir)] == [1, 2, 3, 4, 5, 6]
    evaluations = records_of(run_dir, "evaluation")
    assert [each["step"] for each in evaluations] == [2, 4, 6]
    assert all(set(each["metrics"]) == {"accuracy", "bits_per_byte"} for each in evaluations)
    assert evaluations[0]["sets"]["other"]["weight"] > 0
    assert "bits_per_byte" in evaluations[0]["sets"]["other"]["metrics"]
    assert "held-out loss" in ran.stdout and "held-out (other) loss" in ran.stdout
    (early,) = [each for each in records_of(run_dir, "decision") if each["what"] == "early stopping"]
    assert (early["from"], early["to"]) == ("9 steps", "6 steps") and "accuracy" in early["because"]
    assert records_of(run_dir, "run_ended")[-1]["status"] == "complete"
    page = (run_dir / "report.html").read_text()
    assert "accuracy of held-out samples" in page and "early stopping" in page

    again = paceline(*train)
    assert again.returncode == 0 and "ended early after step 6" in again.stdout
    assert len(steps_of(run_dir)) == 6
    exported = in_process("export", run_dir, tmp_path / "weights", "--step", "best", "--json")
    accuracy = {each["step"]: each["metrics"]["accuracy"] for each in evaluations}
    assert json.loads(exported.stdout)["step"] == max((2, 6), key=lambda step: (accuracy[step], step)), (
        "4 was not saved"
    )

    on = paceline("train", path, "--set", "task.evaluate.patience=3", env=environment())
    assert on.returncode == 0, on.stderr
    assert [step["step"] for step in steps_of(run_dir)] == list(range(1, 9)), (
        "it goes on, and ends one evaluation later"
    )
    told = [each["because"] for each in records_of(run_dir, "decision") if each["what"] == "resume"]
    assert any("task.evaluate.patience was 2 and is now 3" in each for each in told)
