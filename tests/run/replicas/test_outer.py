"""Copies that make steps by themselves and an outer step together, against a plain loop that takes them in turn."""

from __future__ import annotations

import pytest
import torch
from copies import SGD, EvenText, began, by_hand, copies_plan, copies_task, steps_of, whole_weights
from distributed import run_ranks
from rounding import FP64, adam_error

from paceline.errors import VerificationFailed
from paceline.run.numerics.invariants import check_agreement, held_by, numbers_of
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
        check_agreement(built.model, numbers_of(stats, None), step, world, built.stepper.sync.apart_after(step))
    try:
        check_agreement(built.model, {}, steps, world)
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
    ranks = run_ranks(trained, layout.devices, task, plan, STEPS)
    for rank, (ours, held, passes) in enumerate(ranks):
        assert ours == pytest.approx(losses, rel=1e-12)
        copy = layout.coordinates(rank)["dp_replicate"]
        for name, weight in held.items():
            torch.testing.assert_close(weight, weights[copy][name], rtol=0, atol=bound)
        assert not passes, "copies differ after step 7, and invariants that do not know it say so"
    assert not any(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_an_outer_step_in_every_step_is_the_sum_of_every_step() -> None:
    task = copies_task(data=EvenText(), optimizer=SGD)
    plain = run_ranks(trained, 2, task, copies_plan(Sync()), 4)
    outer = run_ranks(trained, 2, task, copies_plan(Sync("outer")), 4)
    for (losses, weights, _), (ours, held, passes) in zip(plain, outer, strict=True):
        assert ours == pytest.approx(losses, rel=1e-13) and passes
        for name, weight in held.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-13)


class Ranks:
    """A world of which this rank is the first: the others hold what they are given."""

    size = 4

    def __init__(self, others: list[dict]) -> None:
        self.others = others

    def gather(self, mine: dict) -> list[dict]:
        return [mine, *self.others]


def test_ranks_of_one_copy_agree_between_outer_steps_and_all_ranks_after_one() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    numbers = {"the loss": 1.0}
    apart = [held_by(one, numbers, 0), held_by(other, numbers, 1), held_by(other, numbers, 1)]
    check_agreement(one, numbers, 1, Ranks(apart), apart=0)
    with pytest.raises(VerificationFailed, match="ranks 0 and 2 no longer agree on weight"):
        check_agreement(one, numbers, 1, Ranks([held_by(one, numbers) for _ in range(1)] + [held_by(other, numbers)]))
    drifted = [held_by(other, numbers, 0), held_by(other, numbers, 1), held_by(other, numbers, 1)]
    with pytest.raises(VerificationFailed, match="ranks 0 and 1 no longer agree on weight"):
        check_agreement(one, numbers, 1, Ranks(drifted), apart=0)
    reported = [held_by(other, {"the loss": 2.0}, 1)]
    with pytest.raises(VerificationFailed, match="no longer agree on the loss"):
        check_agreement(one, numbers, 1, Ranks(reported), apart=0)
