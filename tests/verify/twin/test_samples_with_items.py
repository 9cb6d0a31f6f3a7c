"""A proof whose first samples have no item to learn from is made again on others that have, where there are any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests_shared import plan_of
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task
from paceline.units import Amount
from paceline.verify.process.group import Job, run_jobs
from paceline.verify.process.read_once import ReadOnce
from paceline.verify.twin import chosen as chosen_module
from paceline.verify.twin.chosen import of_chosen, samples_with_items

PLAN = plan_of(Layout(dp_replicate=2), batch=7, precision="fp64")


class RarelyLabelled:
    """Rows of which one in so many has a label; the others have -100."""

    samples, items_per_sample, unit, vocab, fingerprint = 400, 1, "samples", None, "rarely labelled"

    def __init__(self, one_in: int) -> None:
        self.one_in = one_in

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, Tensor]:
        """Return "x", [rows, 6], and "labels", [rows]."""
        x = np.stack([np.random.default_rng(int(i)).normal(size=6) for i in ids])
        labels = [int(i) % 2 if self.one_in and i % self.one_in == 0 else -100 for i in ids]
        return {"x": torch.tensor(x, dtype=torch.float32), "labels": torch.tensor(labels)}


def labelled(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of the rows that have a label, and how many have."""
    labels = batch["labels"]
    return F.cross_entropy(model(batch["x"]), labels, reduction="sum", ignore_index=-100), (labels >= 0).sum()


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def task_of(one_in: int) -> Task:
    rows = RarelyLabelled(one_in)
    return Task(
        model=classifier, data=(rows, rows), objective=labelled, optimizer=OptimizerSpec(lr=1e-2, eps=1e-4),
        global_batch=Amount(200, "samples"), stop=Amount(10, "steps"),
    )  # fmt: skip


def test_two_in_three_of_the_samples_that_are_chosen_have_items(monkeypatch: pytest.MonkeyPatch) -> None:
    source = RarelyLabelled(20)
    chosen = samples_with_items(task_of(20), PLAN, source)
    having = [one for one in chosen if one % 20 == 0]
    assert len(having) == 20 and len(chosen) == 30 == len(set(chosen)), "as many as there are"
    few, ids = of_chosen(source, chosen), np.arange(30)
    x, labels = (few.read(ids)[name] for name in ("x", "labels"))
    assert torch.equal(x, source.read(np.array(chosen))["x"]) and (labels >= 0).sum() == 20
    assert few.samples == 30 and few.vocab is None and few.fingerprint != source.fingerprint
    monkeypatch.setattr(chosen_module, "SECONDS", -1.0)
    assert samples_with_items(task_of(20), PLAN, source) == (), "nobody waits for what is not found in time"
    monkeypatch.undo()
    assert samples_with_items(task_of(0), PLAN, source=RarelyLabelled(0)) == () and of_chosen(source, ()) is source


def test_samples_are_chosen_for_one_spec_alone() -> None:
    """Twins of another length have other samples: ids of the one were read of all of them."""
    read, task = ReadOnce(), task_of(20)
    read.chosen[Path("short"), False] = (0, 20)
    found = [
        read.source(task, masked, Path(name)) for name, masked in (("short", False), ("long", False), ("short", True))
    ]
    assert [each.samples for each in found] == [2, 400, 400]


@pytest.mark.parametrize("one_in", [40, 0], ids=["rarely", "never"])
def test_a_proof_whose_first_samples_have_no_label_is_made_on_others(one_in: int) -> None:
    """It ended with exit code 6, as does training, though a step of a run has some."""
    spec = Spec(task=task_of(one_in))
    found = run_jobs([Job(spec, PLAN, "steps", "uneven rows"), Job(spec, PLAN, "story", "story")], 3)
    if not one_in:
        assert all(isinstance(each, PacelineError) and each.exit_code == 6 for each in found)
        return
    for each in found:
        assert isinstance(each, CheckProof) and each.equal, each
        assert each.differences.get("gradients", 0.0) > 0 or "evaluation" in each.differences
