"""Metrics that keep states: added up over parts of the samples they are those of all, and other states are refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of
from torch import Tensor

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.evaluate import evaluate
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.task.metrics.metric import LossTotal
from paceline.task.metrics.resolve import metrics_of
from paceline.task.objective import classification, multi_label, regression

LOSS = LossTotal(1.0, 1.0)


class Counts:
    """How often each of the first classes is the largest, with the interface of torchmetrics."""

    def __init__(self, classes: int, reduction: Any = lambda whole: whole.sum(dim=0)) -> None:
        self._reductions = {"right": reduction, "all": lambda whole: torch.sum(whole, dim=0)}
        self.classes, self.distributed_available_fn = classes, None
        self.reset()

    def reset(self) -> None:
        self.right, self.all = torch.zeros(self.classes, dtype=torch.int64), torch.tensor(0.0)

    def update(self, chances: Tensor, labels: Tensor) -> None:
        assert bool((chances.sum(-1) - 1).abs().max() < 1e-9)
        right = labels[chances.argmax(-1) == labels]
        self.right = self.right + torch.bincount(right, minlength=self.classes)
        self.all = self.all + len(labels)

    def compute(self) -> Tensor:
        assert self.distributed_available_fn is not None and not self.distributed_available_fn()
        return self.right / self.all

    __call__ = update


def made(metric: Any, objective: Any = classification) -> Any:
    (found,) = metrics_of(EvaluateSpec(metrics=(metric,)), SimpleNamespace(vocab=None), objective)  # type: ignore
    return found


def added(metric: Any, outputs: Tensor, labels: Tensor, *cuts: int) -> dict[str, float]:
    """Return the metric over parts of the samples."""
    sums: dict[str, Any] = {}
    places = [0, *cuts, len(labels)]
    for first, end in itertools.pairwise(places):
        for name, found in metric.measure(outputs[first:end], {"labels": labels[first:end]}).items():
            sums[name] = sums.get(name, 0.0) + found.numpy()
    return metric.values(sums, LOSS)  # type: ignore[no-any-return]


def test_states_are_added_up_however_samples_are_cut() -> None:
    torch.manual_seed(1)
    outputs, labels = torch.randn(20, 3) * 0.1, torch.randint(0, 3, (20,))
    labels[3] = -100
    own, kept = Counts(3), labels != -100
    right = torch.bincount(labels[kept][outputs[kept].argmax(-1) == labels[kept]], minlength=3) / 19
    expected = {f"Counts_{number}": float(each) for number, each in enumerate(right.tolist())}
    for cuts in ((), (7,), (0, 1, 13)):
        assert added(made(own), outputs, labels, *cuts) == pytest.approx(expected)
    assert int(own.all) == 0  # the user's own object is left alone


def test_states_that_are_no_sums_are_refused_by_name() -> None:
    for reduction in (None, torch.cat, lambda whole: whole.max(dim=0).values, lambda whole: whole.mean(dim=0)):
        with pytest.raises(ConfigError, match="'right' is no sum"):
            made(Counts(3, reduction))


def everywhere() -> list[dict[str, float]]:
    world, found = join_world("cpu", threads=1), []
    for layout in (Layout(cp=2), Layout(tp=2)):
        task = decoder_task()
        plan = plan_of(layout, precision="fp64")
        built = assemble(task, plan, world, task.data, SEQ_LEN)
        metrics = metrics_of(EvaluateSpec(metrics=(Counts(61),)), task.data, built.stepper.turns[0].turn.objective,
                             layout.cp)  # fmt: skip
        found.append(dict(evaluate(built.stepper, task.data, 7, layout.data_rank(world.rank), metrics).metrics))
    return found


def test_states_are_those_of_one_device_on_every_layout() -> None:
    first, *others = run_ranks(everywhere, 2)[0]
    assert all(other == first for other in others) and len(first) == 61
    assert PaddedText.vocab == 61 and sum(first.values()) > 0


def test_metrics_of_torchmetrics_are_those_of_all_samples() -> None:
    theirs = pytest.importorskip("torchmetrics", reason="the extra metrics is not installed")
    torch.manual_seed(2)
    outputs, labels = torch.randn(40, 5) * 0.2, torch.randint(0, 5, (40,))
    of = theirs.classification
    for metric in (of.MulticlassF1Score(5), of.MulticlassAUROC(5, thresholds=50), of.MulticlassCalibrationError(5)):
        if isinstance(metric, of.MulticlassCalibrationError):
            with pytest.raises(ConfigError, match="is no sum"):
                made(metric)
            continue
        whole = metric.double()(outputs.double().softmax(-1), labels)
        for cuts in ((), (1, 30)):
            (found,) = added(made(metric), outputs, labels, *cuts).values()
            assert found == pytest.approx(float(whole), rel=1e-6)  # theirs counts in fp32
    with pytest.raises(ConfigError, match="thresholds"):
        made(of.MulticlassAUROC(5))
    numbers, targets = torch.randn(9), torch.randn(9)
    (found,) = added(made(theirs.MeanSquaredError(), regression), numbers[:, None], targets, 4).values()
    assert found == pytest.approx(float((numbers.double() - targets.double()).square().mean()), rel=1e-12)
    targets[2] = torch.nan  # which the objective leaves out
    (found,) = added(made(theirs.MeanSquaredError(), regression), numbers[:, None], targets, 4).values()
    assert found == pytest.approx(float((numbers.double() - targets.double()).square().nanmean()), rel=1e-12)
    columns = (torch.randn(6, 3), torch.randint(0, 2, (6, 3)).float())
    (found,) = added(made(of.MultilabelAccuracy(3, average="micro"), multi_label), *columns, 2).values()
    assert found == pytest.approx(float(((columns[0] > 0) == columns[1].bool()).double().mean()))


def test_a_metric_that_cannot_take_what_the_model_returns_says_what_it_was_given() -> None:
    """A metric of yes or no with a head of two classes ended as a defect of Paceline, deep in torchmetrics."""
    theirs = pytest.importorskip("torchmetrics", reason="the extra metrics is not installed")
    metric = made(theirs.classification.BinaryAUROC(thresholds=20))
    with pytest.raises(ConfigError, match=r"shape \[6, 2\] with labels of shape \[6\]") as raised:
        metric.measure(torch.randn(6, 2), (None, torch.randint(0, 2, (6,))))
    assert "BinaryAUROC raised" in raised.value.because and "num_classes=2" in raised.value.try_
