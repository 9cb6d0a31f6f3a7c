"""A resume says where another version, or other code of the user's, wrote the checkpoint that it goes on from."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.checkpoint import list_checkpoints
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.run.survive.written_by import other_writer, written_by
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.supervise.told.brief import Brief
from paceline.task.own_code import modules_named
from paceline.units import Amount

OBJECTIVE = """
import torch

def loss(model, batch):
    logits, labels = model(batch["tokens"]), batch["labels"]
    kept = labels != -100
    return {factor} * torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="sum"), kept.sum()
"""


def train(folder: Path, steps: int) -> list[str]:
    """Make the run's steps up to one, saved there, and return what its start told of the resume."""
    importlib.invalidate_caches()
    sys.modules.pop("loss_of_a_user", None)
    importlib.import_module("loss_of_a_user")
    task = decoder_task(objective="loss_of_a_user:loss", stop=Amount(6, "steps"))
    run = RunSpec(checkpoint_every=None, evaluate_every=None)
    plan = plan_of(Layout())
    brief = Brief(plan, 6, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    training = Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=run), brief,
                        World(0, 1, 0, torch.device("cpu")), folder / "run")  # fmt: skip
    for batch in training:
        training.step(batch)
        if training.progress.step == steps:
            training.save()
            break
    told = [each for each in read_journal(folder / "run") if each["kind"] == "decision" and each["what"] == "resume"]
    last = max((each["attempt"] for each in told), default=0)
    return [each["because"] for each in told if each["attempt"] == last]


def test_code_that_changed_between_two_starts_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "loss_of_a_user.py"
    module.write_text(OBJECTIVE.format(factor=1))
    train(tmp_path, 2)
    assert not any("changed" in each for each in train(tmp_path, 3)), "the same code: nothing is said"
    module.write_text(OBJECTIVE.format(factor=2.5))
    assert "the code of the module loss_of_a_user has changed, which the task names" in train(tmp_path, 4)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints").complete[0]
    named = newest.manifest.extra["code"]
    assert named == modules_named(["loss_of_a_user:loss", "tests_shared:PaddedText"]), "and that of objects"
    assert newest.manifest.extra["versions"]["numpy"] == np.__version__
    sys.modules.pop("loss_of_a_user")


def test_another_version_is_told_and_what_an_earlier_release_wrote_is_no_other() -> None:
    now = written_by({"model": {"name": "llama-1m"}, "prompt": "why:not", "optimizer": {"name": "torch.optim:SGD"}})
    assert now["code"] == {}, "installed packages have versions, and a text is no module"
    assert other_writer(now, now) == [] and other_writer({}, now) == []
    before = {**now, "versions": {**now["versions"], "torch": "2.9.0", "of_no_name": "1"}}
    assert other_writer(before, now) == [f"torch was 2.9.0 and is now {torch.__version__}"]
