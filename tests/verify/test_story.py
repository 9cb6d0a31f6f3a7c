"""The story catches what a proof of updates cannot see, and flags nothing where nothing is wrong."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tests_shared import SEQ_LEN, Dropout, decoder_task, plan_of

from paceline.errors import StorageError
from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.run.schedule import learning_rate
from paceline.run.world import join_world
from paceline.task.task import OptimizerSpec, ScheduleSpec, Task
from paceline.verify.checks import CHECKS
from paceline.verify.story_plans import LENGTH, WARMUP, expected_rate, other_layout, story_schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "mutations"))

import planted_story
from planted_story import STORIES, STORY_PLANS, Told, expert_task, nothing, story_task

Proof = dict[str, Any]


def prove(check: str, what: str) -> Proof | None:
    """Return the proof of a case with a mistake planted into its ranks, by what is planted."""
    told = next((told for told in STORIES if told.what == what), None)
    case, plant = (told.case, told.plant) if told else (what, nothing)
    world, task = join_world("cpu", threads=1), story_task(case)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, world)
        return CHECKS[check](task, STORY_PLANS[case], world, task.data, SEQ_LEN, 3)


def prove_all(check: str) -> dict[str, Proof | None]:
    """Return the proofs of all mistakes and of all cases without one."""
    return {what: prove(check, what) for what in (*(told.what for told in STORIES), *STORY_PLANS)}


@pytest.fixture(scope="module")
def stories() -> dict[str, Proof]:
    return run_ranks(prove_all, 2, "story", timeout_seconds=240)[0]


@pytest.mark.parametrize("told", STORIES, ids=lambda told: told.what)
def test_the_story_catches_it_and_says_what_it_is(told: Told, stories: dict[str, Proof]) -> None:
    result = stories[told.what]
    first = result["first_difference"]
    assert not result["equal"] and first is not None
    assert (first["quantity"], first["step"], first["family"]) == (told.quantity, told.step, told.family), first
    assert told.says in first["likely"]


@pytest.mark.parametrize("case", STORY_PLANS)
def test_without_a_mistake_it_flags_nothing(case: str, stories: dict[str, Proof]) -> None:
    result = stories[case]
    assert result["equal"] and result["first_difference"] is None, result
    assert not any(math.isnan(value) for value in result["differences"].values())


@pytest.mark.deep
def test_a_proof_of_updates_alone_sees_none_of_them() -> None:
    assert all(proof["equal"] for proof in run_ranks(prove_all, 2, "steps", timeout_seconds=240)[0].values())


def read_at_the_wrong_place() -> str:
    """Return what a story raises where a checkpoint is loaded into the wrong places."""
    world, task = join_world("cpu", threads=1), story_task("copies")
    with pytest.MonkeyPatch.context() as patch:
        planted_story.shards_read_from_the_wrong_place(patch, world)
        try:
            CHECKS["story"](task, STORY_PLANS["copies"], world, task.data, SEQ_LEN, 3)
        except StorageError as error:
            return error.because
    return "nothing"


def test_shards_read_from_the_wrong_place_are_named_by_their_fingerprints() -> None:
    for because in run_ranks(read_at_the_wrong_place, 2):
        assert "the values of 'model." in because
        assert "their fingerprint is" in because


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_the_expected_rate_is_another_at_every_step_and_the_schedules_own(kind: str) -> None:
    plan = plan_of(Layout(), batch=7)
    schedule = story_schedule(ScheduleSpec(kind=kind, final=0.2), plan)
    rates = [expected_rate(schedule, 3e-3, step) for step in range(1, LENGTH + 1)]
    assert len(set(rates)) == LENGTH
    for step, rate in enumerate(rates, 1):
        ran = learning_rate(schedule, 3e-3, step, LENGTH, WARMUP, LENGTH - WARMUP)
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
}


def correct_task(case: str) -> Task:
    if case.startswith("experts"):
        return expert_task()
    changes: dict[str, Any] = {"optimizer": OptimizerSpec(lr=3e-3, eps=1e-4)}
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


def prove_correct(case: str) -> Proof:
    world, task = join_world("cpu", threads=1), correct_task(case)
    return CHECKS["story"](task, CORRECT[case], world, task.data, SEQ_LEN, 3)


@pytest.mark.parametrize("case", CORRECT)
def test_correct_layouts_of_all_axes_tell_the_same_story(case: str) -> None:
    told = run_ranks(prove_correct, CORRECT[case].layout.devices, case)
    assert all(proof["equal"] for proof in told), told[0]["first_difference"]
    assert all({**proof, "seconds": 0} == {**told[0], "seconds": 0} for proof in told), "all ranks say the same"
