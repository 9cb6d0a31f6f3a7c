"""What calls leave in plain attributes is there in each later cut: cuts of programs that nobody has called tell."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_whole_batch import checked, classifier, logits_of, summed, task_of
from tests_shared import plan_of
from torch import Tensor, nn

from paceline.run.numerics.randomness.again import draw_again
from paceline.run.numerics.randomness.mode import SampleRandomness, Survey
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.task.data.sources.mapped import MapSource
from paceline.verify.compare.whole_batch import whole_batch
from paceline.verify.reached.remembered import Remembered, as_it_was


class Calibrated(nn.Module):
    """Divides by a scale that the first micro-batch after each update measures, as ranges of activations are."""

    def __init__(self, by_rows: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.by_rows = nn.Linear(6, 8), nn.Linear(8, 2), by_rows
        self.measured_at, self.scale = -1, torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.body(x).tanh()
        if self.measured_at != self.head.weight._version:
            self.measured_at = self.head.weight._version
            self.scale = (hidden if self.by_rows else self.head.weight).detach().std(unbiased=False) + 1
        return self.head(hidden / self.scale)


def by_weights() -> nn.Module:
    return Calibrated(by_rows=False)


class Denormalised(nn.Module):
    """Keeps a row's own mean and deviation between two layers, and a table by its size, as it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        self.mean, self.deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True)
        hidden = self.body((x - self.mean) / self.deviation).tanh()
        table = self.tables.setdefault(x.shape[1], torch.arange(x.shape[1], dtype=x.dtype).cos())
        return self.head((hidden + table) * self.deviation + self.mean)


class Remembering:
    """An objective that holds a row against what the model said of it before, by its first number."""

    def __init__(self) -> None:
        self.before: dict[float, Tensor] = {}

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss and how far rows are from what was said."""
        loss, rows = summed(model, batch)
        said = logits_of(model, batch).softmax(-1)
        for at, row in zip(batch["ours"][:, 0].tolist(), said, strict=True):
            loss = loss + (row - self.before.get(at, row.detach() / 2)).square().sum()
            self.before[at] = row.detach()
        return loss, rows


class FirstRows:
    """An objective that weighs by the spread of the first rows that it sees."""

    def __init__(self) -> None:
        self.spread: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss, weighed."""
        if self.spread is None:
            self.spread = batch["ours"].std() + 1
        loss, rows = summed(model, batch)
        return loss * self.spread, rows


def first_rows() -> Any:
    """Return such an objective that is a function."""
    spread: Tensor | None = None

    def weighed(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        nonlocal spread
        spread = batch["ours"].std() + 1 if spread is None else spread
        loss, rows = summed(model, batch)
        return loss * spread, rows

    return weighed


BASELINE: Tensor | None = None
SEEN: list[float] = []


def against_a_baseline(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Weigh by the spread of the first rows, in a global variable."""
    global BASELINE
    BASELINE = batch["ours"].std() + 1 if BASELINE is None else BASELINE
    loss, rows = summed(model, batch)
    return loss * BASELINE, rows


def noting(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Keep losses for a chart, in a global list, which changes nothing."""
    loss, rows = summed(model, batch)
    SEEN.append(float(loss))
    return loss, rows


@pytest.mark.parametrize(
    ("model", "objective", "names"),
    [
        (classifier, lambda: against_a_baseline, ("the global BASELINE",)),
        (classifier, lambda: noting, ()),
        (Calibrated, lambda: summed, ("measured_at", "scale")),
        (classifier, FirstRows, ("objective.spread",)),
        (classifier, Remembering, ("objective.before",)),
        (classifier, first_rows, ("objective's spread",)),
        (by_weights, lambda: summed, ()),
        (Denormalised, lambda: summed, ()),
    ],
    ids=["global", "noted", "scale", "object", "rows", "function", "of the weights", "of each row"],
)
def test_what_the_first_rows_leave_behind_is_found(model: Any, objective: Any, names: tuple[str, ...]) -> None:
    """Each later cut had it from the first one: told "equal", and each rank measures its own rows."""
    first = checked(task_of(model, objective())).first_difference
    assert (first is None) == (not names), first
    if first is not None:
        assert first.family == "what calls leave behind" and ", ".join(names) in first.likely


def test_what_the_proof_hangs_on_a_model_is_nothing_that_calls_leave() -> None:
    """A module that draws gets a forward pass of ours: every program with dropout was looked at twice for nothing."""
    model = nn.Sequential(nn.Linear(6, 2), nn.Dropout())
    remembered = Remembered(model, [])
    draw_again(model, SampleRandomness(0, torch.device("cpu"), Survey()))
    assert not remembered.changed()
    model[1].calls = 1  # type: ignore[assignment]
    assert remembered.changed() == ("1.calls",)


def cleared(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Clear gradients first, as in the loop that it was copied from."""
    model.zero_grad()
    return summed(model, batch)


def backward_of_its_own(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Go backward by an auxiliary loss, and return the other alone."""
    with torch.enable_grad():
        (0.1 * logits_of(model, batch).square().sum()).backward()
    return summed(model, batch)


@pytest.mark.parametrize("objective", [cleared, backward_of_its_own])
def test_an_objective_that_changes_gradients_itself_is_told_as_that(objective: Any) -> None:
    """It was told as no sum over rows, or as a gradient that a hook clips."""
    first = checked(task_of(classifier, objective)).first_difference
    assert first is not None and first.family == "gradients taken by the objective"
    assert "zero_grad()" in first.likely and "backward()" in first.likely


class Augmented:
    """Rows with noise; `holds` keeps them as they were read first, or before they have any."""

    def __init__(self, holds: str) -> None:
        self.holds, self.held = holds, dict[int, Any]()

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.holds == "augmented" and index in self.held:
            return self.held[index]
        x = torch.linspace(0, index + 1, 6).cos()
        if self.holds == "plain":
            x = self.held.setdefault(index, x)
        row = {
            "ours": x if self.holds == "nothing drawn" else x + 0.1 * torch.randn(6),
            "labels": torch.tensor(index % 2),
        }
        self.held.setdefault(index, row)
        return row


@pytest.mark.parametrize("holds", ["augmented", "plain", "nothing", "nothing drawn"])
def test_rows_that_keep_what_they_drew_are_named(holds: str) -> None:
    """A second epoch alone shows it, which the proof before training has none of: told "equal"."""
    task = task_of(classifier, summed)
    source = MapSource(Augmented(holds), 0)
    found = whole_batch(task, plan_of(Layout(), 7), join_world("cpu"), source, 1, 3, {})
    assert found.equal is (holds != "augmented"), found.first_difference
    if not found.equal:
        first = found.first_difference
        assert (
            first is not None
            and first.family == "rows that keep what they drew"
            and "before it is augmented" in first.likely
        )


def test_copies_of_an_objective_hold_what_it_held_and_share_its_modules() -> None:
    teacher, held = nn.Linear(6, 6), [1]

    @dataclasses.dataclass
    class Distils:
        teacher: nn.Module
        seen: list[int]

        def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            self.seen.append(len(self.seen))
            return F.mse_loss(logits_of(model, batch), self.teacher(batch["ours"]), reduction="sum"), 1

    def function(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        held.append(len(held))
        return teacher(logits_of(model, batch)).sum(), 1

    function.coupled = "batch"  # type: ignore[attr-defined]
    objective, rows = Distils(teacher, held), {"ours": torch.ones(1, 6)}
    for one in (objective, function):
        remembered, copied = Remembered(nn.Identity(), [one]), as_it_was(one)
        copied(nn.Identity(), rows)
        assert not remembered.changed() and held == [1]
        one(nn.Identity(), rows)
        assert len(remembered.changed()) == 1
        del held[1:]
    assert as_it_was(objective).teacher is teacher and as_it_was(function).coupled == "batch"
    assert as_it_was(summed) is summed
