"""What calls leave in plain attributes is there in each later cut: cuts of programs that nobody has called tell."""

from __future__ import annotations

import collections
import dataclasses
import functools
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
from paceline.verify.reached.kept_rows import row_that_keeps_its_draws
from paceline.verify.reached.remembered import MOST, AsItWas, Remembered


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


class KeptInADict(Calibrated):
    """The same in a dictionary, whose size stays."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"at": -1, "scale": None}

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.body(x).tanh()
        if self.kept["at"] != self.head.weight._version:
            self.kept.update(at=self.head.weight._version, scale=hidden.detach().std(unbiased=False) + 1)
        return self.head(hidden / self.kept["scale"])


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
        (KeptInADict, lambda: summed, ("kept",)),
        (classifier, FirstRows, ("objective.spread",)),
        (classifier, Remembering, ("objective.before",)),
        (classifier, first_rows, ("objective's spread",)),
        (by_weights, lambda: summed, ()),
        (Denormalised, lambda: summed, ()),
    ],
    ids=["global", "noted", "scale", "dictionary", "object", "rows", "function", "of the weights", "of each row"],
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


class MadeLate(Augmented):
    """Makes a layer, whose weights are drawn and then loaded, when the first of its rows is read."""

    fingerprint = "no row is read for it"

    def __init__(self) -> None:
        super().__init__("nothing drawn")
        self.layer: nn.Linear | None = None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.layer is None:
            self.layer = nn.Linear(6, 6)
            nn.init.eye_(self.layer.weight)
        return super().__getitem__(index)


def test_what_a_data_set_draws_once_is_no_sample_that_keeps_its_draws() -> None:
    assert row_that_keeps_its_draws(MapSource(MadeLate(), 0)) is None
    assert row_that_keeps_its_draws(MapSource(Augmented("augmented"), 0)) is not None


class Counted:
    """Counts calls."""

    calls = 0

    def __init__(self) -> None:
        self.calls = 0


def test_an_objective_holds_again_what_it_held_for_a_while() -> None:
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

    for one in (Distils(teacher, held), functools.partial(function), Distils(teacher, held).__call__):
        remembered, was = Remembered(nn.Identity(), [one]), AsItWas(one)
        for _ in range(2):
            one(nn.Identity(), {"ours": torch.ones(1, 6)})
            assert remembered.changed()
        with was.again():
            assert held == [1] and not remembered.changed()
            one(nn.Identity(), {"ours": torch.ones(1, 6)})
            assert held == [1, 1]
        assert held == [1, 1, 2]
        del held[1:]
        assert not remembered.changed()


def test_a_variable_that_nobody_has_set_is_unset_again() -> None:
    if False:
        late = 0

    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        nonlocal late
        late = 1
        return torch.ones(()), late

    was = AsItWas(objective)
    objective(nn.Identity(), {})
    with was.again(), pytest.raises(ValueError, match="empty"):
        _ = objective.__closure__[0].cell_contents  # type: ignore[index]
    assert late == 1


def test_large_tables_that_an_objective_reads_are_not_copied() -> None:
    features, names = torch.arange(MOST + 1.0), [str(place) for place in range(MOST + 1)]

    def objective() -> tuple[Tensor, list[str]]:
        return features, names

    was = AsItWas(objective)
    with was.again():
        assert objective()[0] is features and objective()[1] is names and len(names) == MOST + 1
    assert objective()[0] is features and len(names) == MOST + 1 and float(features[-1]) == MOST


def test_of_the_object_of_a_method_plain_attributes_are_put_back() -> None:
    """It may be a whole program, whose data nobody wants copied."""

    class Program:
        def __init__(self) -> None:
            self.data, self.calls, self.scale = Counted(), 0, None

        def objective(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            self.calls, self.scale, self.late = self.calls + 1, self.scale or 2.0, True
            self.data.calls += 1
            return torch.ones(()), 1

    program = Program()
    was = AsItWas(program.objective)
    program.objective(nn.Identity(), {})
    with was.again():
        assert (program.calls, program.scale, program.data.calls) == (0, None, 1) and not hasattr(program, "late")
        program.objective(nn.Identity(), {})
    assert (program.calls, program.scale, program.data.calls, program.late) == (1, 2.0, 2, True)


@pytest.mark.parametrize("value", [{"a": 1}, [None], collections.deque([None], 1), torch.ones(2), {3}, Counted()])
def test_what_is_written_in_place_has_changed(value: Any) -> None:
    """Containers of one size, tensors and objects counted as what they had been: told "equal"."""
    model = nn.Identity()
    model.holds = value
    remembered = Remembered(model, [])
    assert not remembered.changed()
    if isinstance(value, Tensor):
        value.fill_(3.0)
    elif isinstance(value, set):
        value.pop()
        value.add(4)
    elif isinstance(value, Counted):
        value.calls += 1
    else:
        value["a" if isinstance(value, dict) else 0] = torch.ones(())
    assert remembered.changed() == ("holds",)


ACTS: dict[str, Tensor] = {}


class Hooked(nn.Module):
    """Hands on what a layer gives by a hook that writes a global variable, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(6, 8), nn.Linear(8, 2), 0
        self.body.register_forward_hook(lambda module, inputs, out: ACTS.update(body=out))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        self.calls += 1
        return self.head(self.body(x).tanh())


def of_a_hook(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Return the loss and how large a layer's outputs are."""
    loss, rows = summed(model, batch)
    return loss + 0.1 * ACTS["body"].square().sum(), rows


def test_what_a_hook_writes_is_what_an_objective_reads() -> None:
    """Each cut had a copy of the variable that no hook wrote: a right program was told as what calls leave behind."""
    with torch.no_grad():
        Hooked()(torch.randn(3, 6))
    assert (found := checked(task_of(Hooked, of_a_hook))).equal, found.first_difference


class Detects(nn.Module):
    """Gives a loss in training and findings where it is evaluated, of rows that see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.drop = nn.Linear(6, 8), nn.Linear(8, 2), nn.Dropout(0.2)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """Return the sum of losses, or the class of each row."""
        logits = self.head(self.drop(self.body(x)))
        logits = logits - logits.mean(0)
        if self.training:
            return {"loss": F.cross_entropy(logits, labels, reduction="sum")}
        return [row.argmax() for row in logits]


def detected(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    return model(batch["ours"], batch["labels"])["loss"], len(batch["ours"])


class Normalised(nn.Module):
    """Batch statistics written by hand, running ones in evaluation mode, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.drop = nn.Linear(6, 8), nn.Linear(8, 2), nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.body(x)
        return self.head(self.drop(x - (x.mean(0) if self.training else self.mean)))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))


def put_in_order(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Put rows in the order of their first numbers, as a collate that packs does."""
    order = batch["ours"][:, 0].argsort()
    return summed(model, {name: value[order] for name, value in batch.items()})


@pytest.mark.parametrize(
    ("model", "objective", "family"),
    [
        (dropping, put_in_order, "random numbers of other samples"),
        (Normalised, summed, "loss not a sum over rows"),
        (Detects, detected, "loss not a sum over rows"),
    ],
    ids=["order", "statistics", "findings"],
)
def test_rows_in_another_order_are_told_from_rows_that_see_each_other(model: Any, objective: Any, family: str) -> None:
    """Evaluation mode was asked: a model that gives no loss there ended the proof with an error of its own, and batch
    statistics beside dropout were told as rows in another order."""
    first = checked(task_of(model, objective)).first_difference
    assert first is not None and first.family == family, first


def test_sources_of_any_make_are_asked_for_their_data_set() -> None:
    """A source without a dictionary, or with an `inner` that is none, was an error."""

    class Slotted:
        __slots__ = ()

    class Holds:
        inner = (1, 2)

    assert row_that_keeps_its_draws(Slotted()) is None and row_that_keeps_its_draws(Holds()) is None
