"""Copies that make steps by themselves and an outer step together, against a plain loop that takes them in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from copies import BATCH, SGD, EvenText, began, by_hand, copies_plan, copies_task, steps_of, whole_weights
from distributed import run_kept
from rounding import FP64, adam_error
from tests_shared import plan_of, world_here

from paceline.errors import VerificationFailed
from paceline.run.numerics.invariants import check_agreement, numbers_of
from paceline.run.replicas.copy_sync import EveryStep, StepTotals
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.sync import Sync
from paceline.spec.task import Task

DILOCO = Sync("outer", every=3, lr=0.7, momentum=0.9)
STEPS = 7  # two outer steps, and a step after which copies differ


def trained(task: Task, plan: Plan, steps: int) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Return losses, this rank's weights, and whether its copies pass for equal though they differ."""
    world, built = began(task, plan)
    losses, passes = [], False
    for step in range(1, steps + 1):
        (stats,) = steps_of(built, task, plan, step, step)
        losses.append(stats.loss)
        apart = built.stepper.sync.apart_after(step)
        check_agreement(built.model, numbers_of(stats, None), step, world, plan.layout, apart)
    try:
        check_agreement(built.model, {}, steps, world, plan.layout)
        passes = True
    except VerificationFailed:
        passes = False
    return losses, whole_weights(built), passes


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=2), pytest.param(Layout(dp_replicate=2, dp_shard=2), marks=pytest.mark.deep)],
    ids=str,
)
def test_two_copies_are_a_plain_loop_that_takes_them_in_turn(layout: Layout) -> None:
    task, plan = copies_task(), copies_plan(DILOCO, layout)
    losses, weights = by_hand(task, DILOCO, 2, STEPS)
    bound = adam_error(task.optimizer.lr, task.optimizer.eps, STEPS, FP64)
    ranks = run_kept(trained, layout.devices, task, plan, STEPS)
    for rank, (ours, held, passes) in enumerate(ranks):
        assert ours == pytest.approx(losses, rel=1e-12)
        copy = layout.coordinates(rank)["dp_replicate"]
        for name, weight in held.items():
            torch.testing.assert_close(weight, weights[copy][name], rtol=0, atol=bound)
        assert not passes, "copies differ after step 7, and invariants that do not know it say so"
    assert not any(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_an_outer_step_in_every_step_is_the_sum_of_every_step() -> None:
    task = copies_task(data=EvenText(), optimizer=SGD)
    plain = run_kept(trained, 2, task, copies_plan(Sync()), 4)
    outer = run_kept(trained, 2, task, copies_plan(Sync("outer")), 4)
    for (losses, weights, _), (ours, held, passes) in zip(plain, outer, strict=True):
        assert ours == pytest.approx(losses, rel=1e-13) and passes
        for name, weight in held.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-13)


class Unlabelled(EvenText):
    """Rows without a label that counts."""

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        rows = super().read(ids, positions)
        return {**rows, "labels": torch.full_like(rows["labels"], -100)}


class BesideAnother(EveryStep):
    """One of two copies that make steps by themselves; the other one has ten items, a loss of 20 and a norm of 2."""

    def over_all(self, totals: StepTotals) -> StepTotals:
        square = (totals.grad_norm**2 + 4.0) / 2
        return StepTotals(totals.loss + 20.0, totals.weight + 10.0, square**0.5, totals.stop)


def test_a_copy_without_an_item_makes_no_update_and_ends_no_run() -> None:
    task, plan = copies_task(data=Unlabelled()), plan_of(Layout(), BATCH, precision="fp64")
    world, built = began(task, plan)
    built.stepper.sync = BesideAnother(world, built.model)
    before = whole_weights(built)
    (stats,) = steps_of(built, task, plan, 1, 1)
    assert (stats.loss, stats.weight, stats.updated) == (2.0, 10.0, True)
    assert stats.grad_norm == pytest.approx(2.0**0.5)
    assert all(torch.equal(weight, before[name]) for name, weight in whole_weights(built).items())


TWO_OF_TWO = Layout(dp_replicate=2, dp_shard=2)
ALIKE = (1.0, 1.0, 1.0, 1.0)


def compared(cases: list[tuple[tuple[float, ...], tuple[float, ...], bool]]) -> list[str]:
    """Return what is said of ranks that hold such weights and losses, "" where they agree.

    The third says whether it is known that copies may differ.
    """
    world, found = world_here(), []
    for weights, losses, is_known in cases:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, weights[world.rank])
        torch.nn.init.zeros_(model.bias)
        apart = world.rank // 2 if is_known else None
        try:
            check_agreement(model, {"the loss": losses[world.rank]}, 1, world, TWO_OF_TWO, apart)
            found.append("")
        except VerificationFailed as error:
            found.append(error.what)
    return found


def test_ranks_of_one_copy_agree_between_outer_steps_and_all_ranks_after_one() -> None:
    copies, drifted = (1.0, 1.0, 2.0, 2.0), (1.0, 2.0, 2.0, 2.0)
    cases = [(copies, ALIKE, True), (copies, ALIKE, False), (drifted, ALIKE, True), (copies, copies, True)]
    for apart, together, within, reported in run_kept(compared, 4, cases):
        assert apart == ""
        assert together == "step 1: ranks 0 and 2 no longer agree on weight"
        assert within == "step 1: ranks 0 and 1 no longer agree on weight"
        assert "no longer agree on the loss" in reported, "what is reported is over all copies"
