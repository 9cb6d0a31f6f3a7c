"""The story flags nothing where nothing is wrong; tests/mutations plants what it must name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from distributed import run_kept
from tests_shared import SEQ_LEN, VOCAB, Dropout, PaddedText, decoder_task, plan_of

from paceline.run.callbacks.moment import CallbackMoment
from paceline.run.process.world import World, join_world
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.growth import BatchChange, GrowthSpec, course_of
from paceline.spec.steps.update import GroupSpec, OptimizerSpec, ScheduleSpec
from paceline.spec.task import ModelSpec, Task
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.spec.watch.samples import SamplesSpec
from paceline.task.optimizer.schedule import learning_rate
from paceline.units import Amount
from paceline.verify.compare.asked import Asked
from paceline.verify.process.checks import CHECKS
from paceline.verify.story import reference
from paceline.verify.story.plans import (
    WARMUP,
    acts_of,
    expected_rate,
    other_layout,
    planned_steps,
    story_growth,
    story_schedule,
    story_sizes,
)
from paceline.verify.twin.task import twin_plan

TWO_LAYERS = dataclasses.replace(decoder_task().model, layers=2)


def expert_task() -> Task:
    """Return a small mixture of experts whose balance is kept by a bias, which is a buffer."""
    shape = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 8, "experts": 4, "vocab": VOCAB}
    model = ModelSpec("moe-2m", **shape, balance="bias")
    return decoder_task(model=model, optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))


class Halving:
    """A callback that halves every learning rate."""

    name = "halving"

    def before_step(self, moment: CallbackMoment) -> dict[str, Any]:
        return {"lr": 0.5 * (moment.lr or 0.0)}


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_the_expected_rate_is_another_at_every_step_and_the_schedules_own(kind: str) -> None:
    plan = plan_of(Layout(), batch=7)
    steps = planned_steps(story_sizes(decoder_task(), plan))
    schedule = story_schedule(ScheduleSpec(kind=kind, final=0.2), plan.batch_samples, steps)
    rates = [expected_rate(schedule, 3e-3, step, steps) for step in range(1, steps + 1)]
    assert len(set(rates)) == steps == 6
    for step, rate in enumerate(rates, 1):
        ran = learning_rate(schedule, 3e-3, step, steps, WARMUP, steps - WARMUP)
        assert rate == pytest.approx(ran, rel=1e-14)


def test_the_story_goes_on_on_another_layout_where_the_model_allows_one() -> None:
    def other(layout: Layout, task: Task | None = None) -> str:
        return str(other_layout(task or decoder_task(), plan_of(layout, batch=7)).layout)

    assert other(Layout(dp_shard=2)) == "dp_replicate=2"
    assert other(Layout(dp_replicate=2)) == "dp_shard=2"
    assert other(Layout(tp=2, pp=2)) == other(Layout(dp_shard=2, cp=2)) == "dp_shard=4"
    mine = decoder_task(model=Dropout, objective="next_token")
    assert other(Layout(dp_replicate=2), mine) == "dp_shard=2"
    assert other(Layout(pp=2), mine) == "pp=2", "which axes are open to it is not known"
    assert other(Layout()) == "single device"


def test_the_story_goes_on_under_the_plan_itself_too() -> None:
    """What only a plan's own layout loads was never loaded: a tied weight's second place, a part of a layer."""
    world = World(0, 4, 0, torch.device("cpu"))
    acts = acts_of(decoder_task(), plan_of(Layout(tp=2, pp=2), batch=7), world)
    assert [str(act.plan.layout) for act in acts] == ["tp=2 pp=2", "dp_shard=4", "tp=2 pp=2", "single device"]
    assert [bool(act.resumed) for act in acts] == [False, True, True, True] and len({act.resumed for act in acts}) == 4
    mine = decoder_task(model=Dropout, objective="next_token")
    acts = acts_of(mine, plan_of(Layout(tp=2, pp=2), batch=7), world)
    assert [str(act.plan.layout) for act in acts] == ["tp=2 pp=2", "tp=2 pp=2", "single device"], "and once is enough"


def growing_task(by: str = "schedule", unit: str = "steps") -> Task:
    """Return a task whose batch grows."""
    if by == "noise":
        return decoder_task(growth=GrowthSpec("noise", "linear", largest=Amount(64, "samples")))
    change = BatchChange(Amount(900, unit), Amount(64, "samples"))
    return decoder_task(growth=GrowthSpec("schedule", "sqrt", (change,)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("in_one_piece", [False, True])
@pytest.mark.parametrize("rows", [(), (3, 1)])
def test_a_rank_keeps_its_rows_where_the_storys_batch_grows_by_one(
    ranks: int, in_one_piece: bool, rows: tuple[int, ...]
) -> None:
    """What was worked out for such a rank's coming steps is wrong, and its own rows do not show it."""
    whole = {"micro_batch": 64, "accumulation": 1} if in_one_piece else {}
    unequal = {"rows": (*rows, *[1] * (ranks - 2)), "batch_samples": sum(rows) + ranks - 2} if rows else {}
    real = dataclasses.replace(plan_of(Layout(dp_shard=ranks), batch=12), **whole, **unequal)
    plan = twin_plan(real, "fp64")
    sizes = story_sizes(growing_task(), plan)
    doubled, one_more, last = next(size for size in sizes if size != sizes[0]), *sizes[-2:]
    assert doubled == 2 * plan.batch_samples and one_more == last == doubled + 1
    alike = [plan.rows_of(rank, doubled) == plan.rows_of(rank, one_more) for rank in range(ranks)]
    assert any(alike) and not all(alike)


@pytest.mark.parametrize("unit", ["steps", "samples", "tokens"])
def test_a_storys_batch_grows_where_its_sizes_say(unit: str) -> None:
    task, plan = growing_task(unit=unit), plan_of(Layout(dp_shard=2), batch=9)
    course, position, sizes = course_of(story_growth(task, plan, SEQ_LEN), 9, SEQ_LEN), 0, []
    for step in range(1, len(story_sizes(task, plan)) + 1):
        sizes.append(course.at(step, position))
        position += sizes[-1]
    assert tuple(sizes) == story_sizes(task, plan) == (9, 9, 18, 18, 18, 18, 19, 19, 19)


def test_stories_of_other_tasks_are_no_longer() -> None:
    plan = plan_of(Layout(dp_shard=2), batch=9)
    assert story_sizes(decoder_task(), plan) == (9, 9, 9, 9)
    assert story_sizes(growing_task("noise"), plan) == (9, 9, 18, 18)


def test_a_story_that_is_computed_again_ends_with_the_step_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps and their evaluations were computed, of which a mistake of the first step needs one."""
    plan, made = plan_of(Layout(), batch=5, precision="fp64"), list[int]()
    task = decoder_task(model=TWO_LAYERS, data=(PaddedText(), PaddedText()))
    evaluations = reference.evaluations

    def counted(task: Task, plan: Plan, model: Any, states: Any, *rest: Any) -> Any:
        made.append(len(states))
        return evaluations(task, plan, model, states, *rest)

    monkeypatch.setattr(reference, "evaluations", counted)
    again = reference.unbroken_again(Asked(task, plan, PaddedText(), SEQ_LEN), plan, 3)
    assert {found.step for found in again.moved(torch.float64, 1, 2)} == {1, 2} and made == [2, 2]


CORRECT: dict[str, Plan] = {
    "tensor and stages": plan_of(Layout(tp=2, pp=2), batch=5, precision="fp64"),
    "shared sequences": plan_of(Layout(dp_shard=2, cp=2), batch=7, precision="fp64"),
    "experts, shared sequences": plan_of(Layout(cp=2, ep=2), batch=5, precision="fp64"),
    "offload": plan_of(Layout(dp_shard=2), batch=7, precision="fp64", offload="optimizer"),
    "one micro-batch": plan_of(Layout(dp_replicate=2), batch=7, micro_batch=4, precision="fp64"),
    "dropout": plan_of(Layout(dp_replicate=2), batch=7, precision="fp64"),
    "fp32, zero 1, uneven": plan_of(Layout(dp_shard=3), batch=7, zero=1, precision="fp32"),
    "a module object": plan_of(Layout(dp_shard=2), batch=7, precision="fp64"),
    "one device": plan_of(Layout(), batch=5, precision="fp64"),
    "growing batch": plan_of(Layout(dp_shard=2), batch=5, precision="fp64"),
    "frozen groups": plan_of(Layout(dp_shard=2), batch=5, precision="fp64"),
    "growing by samples": plan_of(Layout(dp_shard=2), batch=5, precision="fp64"),
    "growing by noise": plan_of(Layout(dp_replicate=2), batch=9, precision="fp64"),
    "metrics, tensor": plan_of(Layout(tp=2), batch=5, precision="fp64"),
    "metrics, stages": plan_of(Layout(pp=2), batch=5, precision="fp64"),
    "DoRA with dropout, noise": plan_of(Layout(dp_shard=2), batch=5, precision="fp64"),
    "impatient": plan_of(Layout(dp_replicate=2), batch=5, precision="fp64"),
    "callbacks, prompts": plan_of(Layout(dp_replicate=2), batch=5, precision="fp64"),
}


def correct_task(case: str) -> Task:
    if case.startswith("experts"):
        return expert_task()
    changes: dict[str, Any] = {"model": TWO_LAYERS, "optimizer": OptimizerSpec(lr=3e-3, eps=1e-4)}
    if case == "growing batch":
        changes["growth"] = GrowthSpec("schedule", "sqrt", (BatchChange(Amount(900, "steps"), Amount(64, "samples")),))
    if case == "growing by samples":
        change = BatchChange(Amount(900, "samples"), Amount(64, "samples"))
        changes["growth"] = GrowthSpec("schedule", "sqrt", (change,))
    if case == "growing by noise":
        changes["growth"] = GrowthSpec("noise", "linear", largest=Amount(64, "samples"))
    if case.startswith("metrics"):
        changes["evaluate"] = EvaluateSpec(metrics=("accuracy", "top_3", "f1_macro", "perplexity"))
    if case == "impatient":  # an evaluation that is not better would end the run
        changes["evaluate"] = EvaluateSpec(patience=1, min_delta=1e3)
    if case == "callbacks, prompts":
        changes |= {"callbacks": (Halving(),), "samples": SamplesSpec(prompts=("a",))}
    if case == "DoRA with dropout, noise":
        changes |= {"adapter": AdapterSpec("dora", rank=2, dropout=0.3), "embedding_noise": 5.0}
    if case == "frozen groups":
        until, after = Amount(200, "steps"), Amount(900, "steps")
        groups = (GroupSpec(("*mlp*",), frozen_until=until), GroupSpec(("*norm*",), frozen_after=after))
        changes["optimizer"] = OptimizerSpec(lr=3e-3, eps=1e-4, groups=groups)
    if case == "dropout":
        changes |= {"model": Dropout, "objective": "next_token"}
    elif case == "a module object":
        torch.manual_seed(3)
        changes |= {"model": Dropout(), "objective": "next_token"}
    elif case == "offload":
        changes["optimizer"] = OptimizerSpec(lr=3e-3, eps=1e-4, clip_norm=0.0)
    elif case == "one micro-batch":
        changes["optimizer"] = OptimizerSpec(name="sgd", lr=3e-3)
    return decoder_task(**changes)


def prove_correct(case: str) -> CheckProof:
    world, task = join_world("cpu", threads=1), correct_task(case)
    held_out = dataclasses.replace(task, data=(task.data, PaddedText()))
    return CHECKS["story"](held_out, CORRECT[case], world, PaddedText(), SEQ_LEN, 3)


@pytest.mark.parametrize("case", CORRECT)
def test_correct_layouts_of_all_axes_tell_the_same_story(case: str) -> None:
    told = run_kept(prove_correct, CORRECT[case].layout.devices, case)
    assert all(proof.equal for proof in told), told[0].first_difference
    assert not any(math.isnan(value) for value in told[0].differences.values())
    alike = {repr(dataclasses.replace(proof, seconds=0)) for proof in told}
    assert len(alike) == 1, "all ranks say the same"
