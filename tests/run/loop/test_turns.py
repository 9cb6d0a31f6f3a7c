"""Objectives that take turns, as in a GAN: like a plain torch loop on every data layout, and told where they leak."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from distributed import run_kept, run_ranks
from gans import Gan, fooled, gan_task, judged, plain_gan
from programs import EVERY_LAYOUT, ROWS, Rows, whole
from tests_shared import plan_of, world_here

from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.step import StepStats
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.steps.update import GroupSpec, OptimizerSpec
from paceline.spec.task import Task
from paceline.task.data.order.permutation import sample_ids
from paceline.units import Amount

STEPS = 20


def trained(task: Task, plan: Plan, steps: int) -> tuple[list[StepStats], Assembled]:
    """Make steps under a plan, in the ranks that are running."""
    world = world_here()
    built = assemble(task, plan, world, task.data, 1)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    return [built.stepper.step(stream.at(step * ROWS), task.optimizer.lr) for step in range(steps)], built


def laid_out(
    layout: Layout, zero: int, steps: int, every: int = 1, compile: bool = False, **task: Any
) -> dict[str, Any]:
    """Train the GAN in fp64 and return what the plain loop returns."""
    plan = plan_of(layout, batch=ROWS, zero=zero, precision="fp64", compile=compile)
    stats, built = trained(gan_task(every=every, **task), plan, steps)
    found: dict[str, Any] = {
        name: [each.turns[name].loss for each in stats if name in each.turns] for name in ("judge", "maker")
    }
    assert [each.loss for each in stats] == found["judge"]
    return {**found, "state": {name: whole(p) for name, p in built.model.named_parameters()}}


def assert_like(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for name in ("judge", "maker"):
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-9, atol=0.0)
    for name, weight in plain["state"].items():
        torch.testing.assert_close(
            ours["state"][name], weight, rtol=1e-9, atol=1e-11, msg=lambda text, at=name: f"{at}: {text}"
        )


def test_twenty_steps_on_one_device_are_a_plain_loop() -> None:
    (ours,) = run_kept(laid_out, 1, Layout(), 3, STEPS)
    assert_like(ours, plain_gan(STEPS))


def test_twenty_steps_on_two_shards_are_a_plain_loop() -> None:
    plain = plain_gan(STEPS)
    for ours in run_kept(laid_out, 2, Layout(dp_shard=2), 3, STEPS):
        assert_like(ours, plain)


@pytest.mark.deep
@pytest.mark.parametrize(("layout", "zero"), EVERY_LAYOUT, ids=str)
def test_every_data_layout_is_a_plain_loop(layout: Layout, zero: int) -> None:
    plain = plain_gan(6, every=3)
    for ours in run_kept(laid_out, layout.devices, layout, zero, 6, 3):
        assert_like(ours, plain)


class WholeGan(Gan):
    """A GAN of which all weights are gathered before each pass."""

    needs_whole_weights = True


@pytest.mark.deep
def test_weights_that_are_gathered_at_once_are_a_plain_loop() -> None:
    plain = plain_gan(4)
    for ours in run_kept(functools.partial(laid_out, model=WholeGan), 2, Layout(dp_shard=2), 3, 4):
        assert_like(ours, plain)


@pytest.mark.deep
def test_compiled_turns_are_a_plain_loop() -> None:
    (ours,) = run_kept(functools.partial(laid_out, compile=True), 1, Layout(), 3, 4)
    assert_like(ours, plain_gan(4))


def test_a_turn_comes_in_every_so_many_steps() -> None:
    (ours,) = run_kept(laid_out, 1, Layout(), 3, 7, 3)
    assert len(ours["judge"]) == 7
    assert len(ours["maker"]) == 3  # in steps 1, 4 and 7
    assert_like(ours, plain_gan(7, every=3))


def test_a_turn_of_which_all_parameters_stay_as_they_are_changes_nothing() -> None:
    frozen = GroupSpec(match=("judge.*",), frozen_after=Amount(1, "steps"))
    task, world = gan_task(optimizer=OptimizerSpec(lr=1e-3, groups=(frozen,))), world_here()
    plan = plan_of(Layout(), batch=ROWS, precision="fp64")
    built = assemble(task, plan, world, task.data, 1)
    built.stepper.freezes = True
    stream, seen = BatchStream(task.data, task.seed, plan, 0, world.device), []
    for step in range(3):
        built.stepper.step(stream.at(step * ROWS), task.optimizer.lr)
        seen.append({name: whole(p).clone() for name, p in built.model.named_parameters()})
    for name in seen[0]:
        assert torch.equal(seen[0][name], seen[2][name]) is name.startswith("judge."), name


class Counting(torch.optim.SGD):
    """SGD whose rate falls with its own count of updates, which it keeps in no parameter's state."""

    paceline_scope = "element"

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.updates = 0

    def step(self, closure: Any = None) -> None:
        self.updates += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / self.updates
        super().step(closure)


def counting_gan(every: int) -> dict[str, torch.Tensor]:
    """Return the weights after four steps under the optimizer."""
    optimizer = OptimizerSpec(name=Counting, lr=0.05, weight_decay=0.0, clip_norm=0.0)
    plan = plan_of(Layout(), batch=ROWS, precision="fp64")
    task = gan_task(every=every, optimizer=optimizer)
    turns = tuple(dataclasses.replace(turn, clip_norm=None) for turn in task.turns)
    _, built = trained(dataclasses.replace(task, turns=turns), plan, 4)
    return {name: whole(p) for name, p in built.model.named_parameters()}


def test_each_turn_has_an_optimizer_of_its_own() -> None:
    torch.manual_seed(7)
    model, updates = Gan().double(), {"judge": 0, "maker": 0}
    for step in range(4):
        positions = torch.arange(step * ROWS, (step + 1) * ROWS).numpy()
        batch = {
            k: v.double() if v.is_floating_point() else v
            for k, v in Rows().read(sample_ids(7, positions, Rows.samples)).items()
        }
        for name, net, objective in (("judge", model.judge, judged), ("maker", model.maker, fooled)):
            if name == "maker" and step % 2:
                continue
            updates[name] += 1
            model.zero_grad()
            loss, weight = objective(model, batch)
            (loss / weight).backward()
            with torch.no_grad():
                for weight in net.parameters():
                    weight -= 0.05 / updates[name] * weight.grad
    (ours,) = run_ranks(counting_gan, 1, 2)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(ours[name], weight.detach(), rtol=1e-10, atol=1e-12)


def noisy(layout: Layout) -> dict[str, Any]:
    return laid_out(layout, 3, 3, model=lambda: Gan(noise=True))


def noises(steps: int) -> list[torch.Tensor]:
    """Return what the generator adds to its rows in every pass of some steps on one device, in whole batches."""
    drawn: list[torch.Tensor] = []

    def noisy_gan() -> Gan:
        model = Gan(noise=True)
        model.maker.register_forward_pre_hook(lambda _, args: drawn.append(args[0].detach().clone()))
        return model

    plan = dataclasses.replace(plan_of(Layout(), batch=ROWS, precision="fp64"), micro_batch=ROWS, accumulation=1)
    task = gan_task(noisy_gan)
    world = world_here()
    built = assemble(task, plan, world, task.data, 1)
    stream = BatchStream(task.data, task.seed, plan, 0, world.device)
    drawn.clear()
    for step in range(steps):
        batch = stream.at(step * ROWS)
        built.stepper.step(batch, 0.0)
        at = -len(task.turns)
        seen = batch.micro_batches[0].data["x"].flip(-1).double()
        drawn[at:] = [rows - seen for rows in drawn[at:]]
    return drawn


def test_noise_belongs_to_sample_and_turn() -> None:
    one, *_ = run_kept(noisy, 1, Layout())
    for other in run_kept(noisy, 2, Layout(dp_shard=2)):
        assert_like(other, one)
    (drawn,) = run_kept(noises, 1, 2)
    assert len(drawn) == 4  # two turns of two steps
    for first in range(4):
        for second in range(first):
            assert (drawn[first] - drawn[second]).abs().max() > 0.1
