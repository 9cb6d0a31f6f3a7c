"""Metrics on every axis are those of one device, which are a plain computation over the whole held-out set."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from programs import Rows, Stack, cross_entropy
from runs import steps_of
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.evaluate import EvaluationResult, evaluate, try_evaluation
from paceline.run.loop.loader import held_out_ids
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.run import RunSpec
from paceline.spec.steps.update import ScheduleSpec
from paceline.spec.task import Task
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.supervise.told.brief import Brief
from paceline.task.metrics.resolve import metrics_of
from paceline.task.objective import next_token_logits
from paceline.units import Amount

HELD_OUT = 11
LAYOUTS = [
    (Layout(dp_replicate=4), (7, 0, 1, 5)),  # a rank without rows
    (Layout(dp_shard=2, tp=2), ()),
    (Layout(dp_shard=2, cp=2), ()),
    (Layout(dp_shard=2, pp=2), ()),
]
CPU = torch.device("cpu")


def confident(outputs: Any, batch: Any) -> dict[str, Any]:
    """Return how sure the model is of its tokens, and how many labels are even."""
    sure = torch.log_softmax(getattr(outputs, "full_tensor", lambda: outputs)().double(), -1).max(-1).values
    counts = batch["labels"] != -100
    return {
        "sure": (sure[counts].sum(), counts.sum()),
        "even": ((batch["labels"][counts] % 2 == 0).sum(), counts.sum()),
    }


confident.sums_over_tokens = True  # type: ignore[attr-defined]
NAMES = ("accuracy", "top_3", "f1_macro", "perplexity", confident)


def plan_for(layout: Layout, rows: tuple[int, ...] = ()) -> Plan:
    plan = plan_of(layout, precision="fp64")
    passes = max(layout.pp, accumulation_for(13, layout.data_degree, 2, rows)) if rows else plan.accumulation
    return dataclasses.replace(plan, rows=rows, accumulation=passes)


def measured(plan: Plan, world: World) -> EvaluationResult:
    task = decoder_task()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    objective = built.stepper.turns[0].turn.objective
    metrics = metrics_of(EvaluateSpec(metrics=NAMES), task.data, objective, plan.layout.cp)
    try_evaluation(built.stepper, task.data, HELD_OUT, plan.layout.data_rank(world.rank), metrics)  # leaves nothing
    return evaluate(built.stepper, task.data, HELD_OUT, plan.layout.data_rank(world.rank), metrics)


def everywhere() -> list[EvaluationResult]:
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), CPU)
    return [measured(plan_for(layout, rows), world) for layout, rows in LAYOUTS]


def test_metrics_on_every_axis_are_those_of_one_device() -> None:
    alone = World(0, 1, 0, CPU)
    single = measured(plan_for(Layout()), alone)
    task = decoder_task()
    built = assemble(task, plan_for(Layout()), alone, task.data, SEQ_LEN)
    batch = PaddedText().read(held_out_ids(PaddedText(), HELD_OUT))
    with torch.no_grad():
        logits = next_token_logits(built.model.eval(), batch)
    counts = batch["labels"] != -100
    right = (logits.argmax(-1) == batch["labels"])[counts]
    assert single.metrics["accuracy"] == pytest.approx(right.double().mean().item(), rel=1e-12)
    assert single.metrics["perplexity"] == pytest.approx(math.exp(single.loss), rel=1e-12)
    assert list(single.metrics) == ["accuracy", "top_3", "f1_macro", "perplexity", "even", "sure"]
    for found in run_ranks(everywhere, 4):
        for (layout, _), each in zip(LAYOUTS, found, strict=True):
            assert each.loss == pytest.approx(single.loss, rel=1e-12), layout
            assert dict(each.metrics) == pytest.approx(dict(single.metrics), rel=1e-11), layout


def calls_a_part(model: Stack, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss of a model that is never called itself."""
    return model.head(model.stem(batch["x"])).square().sum(), torch.tensor(len(batch["x"]))


def stack_task(objective: Any) -> Task:
    return Task(name="stack", model=Stack, data=Rows(), objective=objective, schedule=ScheduleSpec(kind="constant"),
                global_batch=Amount(13, "samples"), stop=Amount(3, "steps"))  # fmt: skip


def test_what_a_users_objective_gets_from_the_model_is_measured() -> None:
    alone, plan = World(0, 1, 0, CPU), plan_for(Layout())
    built = assemble(stack_task(cross_entropy), plan, alone, Rows(), 1)
    metrics = metrics_of(EvaluateSpec(metrics=("accuracy",)), Rows(), cross_entropy)  # type: ignore[arg-type]
    found = evaluate(built.stepper, Rows(), HELD_OUT, 0, metrics)  # type: ignore[arg-type]
    batch = Rows().read(held_out_ids(Rows(), HELD_OUT))  # type: ignore[arg-type]
    with torch.no_grad():
        right = (built.model(batch["x"].double()).argmax(-1) == batch["labels"]).double().mean().item()
    assert found.metrics == {"accuracy": pytest.approx(right)}
    assert built.stepper.passes.objective is cross_entropy, "the objective is back in its place"  # type: ignore[attr-defined]
    built = assemble(stack_task(calls_a_part), plan, alone, Rows(), 1)
    with pytest.raises(ConfigError, match="did not call the model"):
        evaluate(built.stepper, Rows(), HELD_OUT, 0, metrics)  # type: ignore[arg-type]


def of_classes(outputs: Any, batch: Any) -> torch.Tensor:
    """Return a number for each row of a model whose outputs have `.logits`, as this one's have not."""
    return (outputs.logits.argmax(-1) == batch["labels"]).double()


def trained(folder: Path, *metrics: Any) -> list[float]:
    """Return the losses of three steps in a run with an evaluation after each."""
    task = dataclasses.replace(stack_task(cross_entropy), data=(Rows(), Rows()),
                               evaluate=EvaluateSpec(metrics=metrics))  # fmt: skip
    run = RunSpec(checkpoint_every=None, evaluate_every=Amount(1, "steps"))
    brief = Brief(plan_for(Layout()), 3, 1, "samples", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    training = Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=run), brief, World(0, 1, 0, CPU), folder)
    return [training.step(batch).loss for batch in training]


def test_a_metric_that_cannot_read_the_outputs_is_told_before_the_first_step(tmp_path: Path) -> None:
    """It trained up to the first evaluation, and ended there in an error of the user's code."""
    with pytest.raises(ConfigError, match=r"'of_classes' raised AttributeError: .*no attribute 'logits'") as raised:
        trained(tmp_path / "a", of_classes)
    assert "outputs = a tensor [" in raised.value.because and "labels: a tensor [" in raised.value.because
    assert raised.value.exit_code == 2 and not steps_of(tmp_path / "a")
    assert trained(tmp_path / "b", "accuracy") == trained(tmp_path / "c"), "to try a metric changes no step"
    assert len(steps_of(tmp_path / "b")) == 3
