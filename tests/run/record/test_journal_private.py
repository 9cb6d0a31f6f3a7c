"""A journal is its user's alone, and no secret that a run was given is in it."""

from __future__ import annotations

import dataclasses
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.cli.main import main
from paceline.observe.exports.tensorboard import asked_sinks
from paceline.report.build import write_report
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.run.record.journal import Journal
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.kinds import DecisionRecord, RunStarted
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.journal.record import now, read
from paceline.spec.journal.redact import MARK, Redactor
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.supervise.again.mark_journal import mark_end
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

STEPS = 2
SECRETS = {
    "a token": "hf_" + "aB3dE6gH9j" * 4,
    "an option": "correct-horse-battery",
    "a password": "s3same",
    "an own shape": "ACME-4711",
}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_journal_is_the_users_alone(tmp_path: Path, umask: int) -> None:
    for group_read, mode in ((False, 0o600), (True, 0o640), (False, 0o600)):
        journal = Journal(tmp_path, group_read=group_read)
        journal.write(now(read(RunStarted, {"attempt": journal.attempt})))
        journal.close()
        mark_end(tmp_path, 1, {"what": "w", "because": "b"})
        assert mode_of(journal.path) == mode
        assert mode_of(write_report(tmp_path)) == mode, "the report repeats the journal"


def test_no_secret_of_a_run_is_in_its_journal(tmp_path: Path) -> None:
    words = ["train.py", SECRETS["a token"], "--api-key", SECRETS["an option"], "--steps", "2"]
    words += [f"https://me:{SECRETS['a password']}@example.com/x", f"project={SECRETS['an own shape']}"]
    task = dataclasses.replace(decoder_task(stop=Amount(STEPS, "steps")), name="tiny")
    run = RunSpec(checkpoint_every=None, evaluate_every=None, redact=(r"ACME-\d+",), tensorboard=True)
    arguments, because = {"arguments": {"auth_token": SECRETS["an option"]}}, f"of {SECRETS['an own shape']}"
    decision = DecisionRecord("plan", arguments, words[1], because, None)
    record = PlannedRecord(facts={"description": f"text of {words[-2]}"}, decisions=(decision,))
    brief = Brief(plan_of(Layout()), STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, record)
    brief = dataclasses.replace(brief, command=tuple(words))
    spec = Spec(task=task, cluster=ClusterSpec(learn=False), run=run)
    training = Training(spec, brief, World(0, 1, 0, torch.device("cpu")), tmp_path, asked_sinks(run))
    with pytest.raises(RuntimeError):
        for batch in training:
            training.step(batch)
            training.failed(RuntimeError(f"cannot open {words[-2]} with {SECRETS['a token']}"))
            raise RuntimeError
    files = [path for folder in ("journal", "tensorboard") for path in (tmp_path / folder).iterdir()]
    assert len(files) == 2
    for path in (*files, write_report(tmp_path)):
        content = path.read_text(errors="replace")
        assert [kind for kind, secret in SECRETS.items() if secret in content] == [], path
    records = list(read_journal(tmp_path))
    command = records[0]["command"]
    assert command == ["train.py", MARK, "--api-key", MARK, "--steps", "2", f"https://{MARK}@example.com/x",
                       f"project={MARK}"]  # fmt: skip
    assert records[-1]["kind"] == "run_ended" and MARK in records[-1]["error"]["traceback"]
    assert [each["step"] for each in records if each["kind"] == "step"] == [1]


def test_an_end_that_a_supervisor_adds_holds_no_secret(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(now(read(RunStarted, {"attempt": 1})))
    journal.close()
    error = {
        "what": f"died of {SECRETS['a token']}",
        "because": SECRETS["an own shape"],
        "traceback": "--password x1y2",
    }
    mark_end(tmp_path, 1, error, Redactor((r"ACME-\d+",)))
    text = journal.path.read_text()
    assert text.count(MARK) >= 3 and "ACME" not in text and "hf_" not in text and "x1y2" not in text


def test_a_wrong_pattern_is_told_before_anything_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--set", 'run.redact=["("]', "--run-dir", str(tmp_path / "run")]) == 2
    told = capsys.readouterr()
    assert "run.redact has '('" in told.err and not told.out and not (tmp_path / "run").exists()
