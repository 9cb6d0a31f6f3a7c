"""Evaluations that are no sums over rows: held-out losses and metrics that would follow the layout are told."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from test_whole_batch import ROWS, Pairs, checked, classifier, mean_and_rows, summed, task_of
from tests_shared import plan_of
from torch import Tensor, nn

from paceline.spec.layout import Layout
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.task.metrics.own import OwnMetric
from paceline.verify.compare.in_a_group import first_numbers
from paceline.verify.compare.whole_evaluation import Evaluation, evaluation_apart


class CentredWhenEvaluated(nn.Module):
    """Takes the mean over its rows away, in evaluations alone: no gradient shows it."""

    def __init__(self, running: bool) -> None:
        super().__init__()
        self.body, self.head, self._running = nn.Linear(6, 8), nn.Linear(8, 2), running
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.body(x).tanh()
        return self.head(x if self.training else x - (self.mean if self._running else x.mean(0)))


class FailsEvaluated(nn.Module):
    """Wants more of its rows where it is evaluated than a batch of training has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        assert self.training, "the rows of an evaluation have names"
        return self.head(x)


def ranked(outputs: Tensor, batch: Any) -> dict[str, Any]:
    """Return an AUC of the rows that are there, with their number: no sum over rows."""
    score, is_one = outputs[:, 1] - outputs[:, 0], batch["labels"] == 1
    pairs = (score[is_one][:, None] > score[~is_one][None]).double()
    return {"auc": (pairs.mean() * len(score), len(score)) if pairs.numel() else (0.0, 0)}


def right(outputs: Tensor, batch: Any) -> Tensor:
    """Return which rows are told right."""
    return (outputs.argmax(1) == batch["labels"]).double()


@pytest.mark.parametrize(
    ("model", "metric", "name"),
    [
        (lambda: CentredWhenEvaluated(running=False), right, "the loss in evaluation mode"),
        (lambda: CentredWhenEvaluated(running=True), right, ""),
        (classifier, ranked, "the metric auc"),
        (classifier, right, ""),
        (FailsEvaluated, right, ""),
    ],
    ids=["own rows", "running mean", "AUC", "accuracy", "fails"],
)
def test_an_evaluation_that_follows_the_cut_of_its_rows_is_named(model: Any, metric: Any, name: str) -> None:
    """It was told "equal": what was held out was left out of the comparison in silence."""
    task = dataclasses.replace(task_of(model, summed), evaluate=EvaluateSpec(metrics=(metric,)))
    assert checked(task).equal, "nothing is held out: it is never evaluated"
    found = checked(dataclasses.replace(task, data=(Pairs(), Pairs())))
    first = found.first_difference
    assert found.equal is not bool(name), first
    assert first is None or (first.name, first.family) == (name, "evaluation not a sum over rows")
    assert first is None or f"{name} of 7 rows is" in first.likely


def test_what_is_never_evaluated_is_not_asked_for_first_numbers_of_an_evaluation() -> None:
    """A model that fails where it is evaluated, in a task that has metrics and nothing to evaluate them on."""
    task = dataclasses.replace(task_of(FailsEvaluated, summed), evaluate=EvaluateSpec(metrics=(right,)))
    found = first_numbers(task, plan_of(Layout(), ROWS), Pairs(), 1)
    assert found is not None and ("loss", "loss") in found.numbers
    with pytest.raises(AssertionError, match="have names"):
        first_numbers(dataclasses.replace(task, data=(Pairs(), Pairs())), plan_of(Layout(), ROWS), Pairs(), 1)


def test_a_loss_that_is_no_sum_in_training_is_told_as_that() -> None:
    found = checked(task_of(classifier, mean_and_rows)).first_difference
    assert found is not None and found.family == "loss not a sum over rows"


def test_a_metric_whose_rows_cancel_is_held_against_their_size() -> None:
    """A mean error that is nearly none: what rounds in its rows was told as a sum that follows the cut."""
    given = torch.tensor([[1.0], [-1.0], [1.0], [-1.0 + 1e-4]], dtype=torch.float64)

    def rounded(outputs: Tensor, batch: Any) -> Tensor:
        return outputs[:, 0] + 1e-8 * len(outputs)  # as a kernel of fp32 does that takes more rows another way

    def objective(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
        return model(rows).square().sum(), len(rows)

    def apart(metric: Any) -> Any:
        read = lambda start, size: (contextlib.nullcontext(), given[start : start + size])  # noqa: E731
        evaluation = Evaluation(nn.Identity(), objective, [OwnMetric(metric, "bias")], read)
        return evaluation_apart(evaluation, [(4,), (2, 2), (1, 1, 1, 1)], 0.0)

    assert apart(rounded) is None
    assert apart(lambda outputs, batch: outputs[:, 0] + 1e-4 * len(outputs)).name == "the metric bias"
