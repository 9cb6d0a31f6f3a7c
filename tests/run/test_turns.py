"""Objectives that take turns, as in a GAN: like a plain torch loop on every data layout, and told where they leak."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from gans import Gan, fooled, gan_task, judged, judged_at_once, mean_of_rows, plain_gan
from programs import EVERY_LAYOUT, ROWS, Rows, whole
from tests_shared import plan_of

from paceline.errors import ConfigError, DoesNotFit, NumericalStop
from paceline.plan.layout import Layout
from paceline.plan.plan import Plan, PlanSpec
from paceline.plan.session import profile_task
from paceline.run.assemble import Assembled, assemble
from paceline.run.handover import hand_over, take_over
from paceline.run.loader import BatchStream
from paceline.run.step import Stepper, StepStats
from paceline.run.world import join_world
from paceline.spec import Spec, parse_spec, spec_from_dict, spec_to_dict
from paceline.task.data.facts import data_facts
from paceline.task.data.order import sample_ids
from paceline.task.task import OptimizerSpec, Task
from paceline.verify.compare import compare
from paceline.verify.low import low
from paceline.verify.start import exact_plan
from paceline.verify.story import story
from paceline.verify.whole_batch import whole_batch

STEPS = 20


def trained(task: Task, plan: Plan, steps: int) -> tuple[list[StepStats], Assembled]:
    """Make steps under a plan, in the ranks that are running."""
    world = join_world("cpu", threads=1)
    built = assemble(task, plan, world, task.data, 1)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    return [built.stepper.step(stream.at(step * ROWS), task.optimizer.lr) for step in range(steps)], built


def laid_out(layout: Layout, zero: int, steps: int, every: int = 1, **task: Any) -> dict[str, Any]:
    """Train the GAN in fp64 and return what the plain loop returns."""
    plan = plan_of(layout, batch=ROWS, zero=zero, precision="fp64")
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
    (ours,) = run_ranks(laid_out, 1, Layout(), 3, STEPS)
    assert_like(ours, plain_gan(STEPS))


def test_twenty_steps_on_two_shards_are_a_plain_loop() -> None:
    plain = plain_gan(STEPS)
    for ours in run_ranks(laid_out, 2, Layout(dp_shard=2), 3, STEPS):
        assert_like(ours, plain)


@pytest.mark.deep
@pytest.mark.parametrize(("layout", "zero"), EVERY_LAYOUT, ids=str)
def test_every_data_layout_is_a_plain_loop(layout: Layout, zero: int) -> None:
    plain = plain_gan(6, every=3)
    for ours in run_ranks(laid_out, layout.devices, layout, zero, 6, 3):
        assert_like(ours, plain)


def test_a_turn_comes_in_every_so_many_steps() -> None:
    (ours,) = run_ranks(laid_out, 1, Layout(), 3, 7, 3)
    assert len(ours["judge"]) == 7
    assert len(ours["maker"]) == 3  # in steps 1, 4 and 7
    assert_like(ours, plain_gan(7, every=3))


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
    world = join_world("cpu", threads=1)
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
    one, *_ = run_ranks(noisy, 1, Layout())
    for other in run_ranks(noisy, 2, Layout(dp_shard=2)):
        assert_like(other, one)
    (drawn,) = run_ranks(noises, 1, 2)
    assert len(drawn) == 4  # two turns of two steps
    for first in range(4):
        for second in range(first):
            assert (drawn[first] - drawn[second]).abs().max() > 0.1


# ---- the proof -------------------------------------------------------------------------------------------------------


def leaks_into(stepper: Any, turn: Any) -> None:
    """Keep the gradients that a turn leaves in others' parameters, and update those too."""
    turn.parameters = [p for p in stepper.model.parameters() if p.requires_grad]


def held(check: str, layout: Layout, planted: str = "", precision: str = "fp64", **task: Any) -> dict[str, Any]:
    """Return the record of a check of the GAN, in the ranks that are running."""
    world = join_world("cpu", threads=1)
    checks = {"steps": compare, "story": story, "whole batch": whole_batch, "low": low}
    if planted == "leak":
        Stepper._keep_own = leaks_into  # type: ignore[method-assign]
    if planted == "order":
        made = Stepper.step
        Stepper.step = lambda self, *args, **more: (  # type: ignore[method-assign]
            setattr(self, "turns", sorted(self.turns, key=lambda turn: turn.turn.name, reverse=True)),
            setattr(self, "main", 1),
            made(self, *args, **more),
        )[-1]
    made_of = gan_task(**task)
    plan = dataclasses.replace(plan_of(layout, batch=ROWS, zero=3, precision=precision), bucket_bytes=512)
    return checks[check](made_of, plan, world, made_of.data, 1, 3, {})


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2)], ids=str)
def test_the_proof_says_equal(layout: Layout) -> None:
    assert run_ranks(held, 2, "steps", layout)[0]["equal"]


def test_a_turn_that_leaks_into_the_other_net_is_told_unequal() -> None:
    record = run_ranks(held, 2, "steps", Layout(dp_shard=2), "leak")[0]
    assert not record["equal"]
    assert record["first_difference"]["quantity"] in ("gradients", "grad_norm")
    assert record["first_difference"]["step"] == 1


def test_turns_in_another_order_are_told_unequal() -> None:
    record = run_ranks(held, 2, "steps", Layout(dp_shard=2), "order")[0]
    assert not record["equal"]


@pytest.mark.deep
def test_the_story_of_a_gan_is_one_devices() -> None:
    record = run_ranks(functools.partial(held, every=2), 2, "story", Layout(dp_shard=2))[0]
    assert record["equal"], record["first_difference"]
    assert record["differences"]["evaluation"] < 1e-12


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_one_devices(precision: str) -> None:
    record = run_ranks(low_held, 2, "", precision)[0]
    assert record["equal"], record["first_difference"]
    assert 0 < record["of_bound"] <= 1


def low_held(planted: str, precision: str) -> dict[str, Any]:
    # A weight that is used twice in a pass has its two gradients added in bf16 by FSDP2, and in fp32 on one device.
    return held("low", Layout(dp_shard=2), planted, precision, judge=judged_at_once)


def test_low_precision_tells_a_leak() -> None:
    assert not run_ranks(low_held, 2, "leak", "bf16")[0]["equal"]


def test_every_objective_is_held_against_whole_batches() -> None:
    assert run_ranks(held, 1, "whole batch", Layout())[0]["equal"]
    wrong = run_ranks(functools.partial(held, maker=mean_of_rows), 1, "whole batch", Layout())[0]
    assert not wrong["equal"]
    assert wrong["first_difference"]["name"] == "loss of maker"


# ---- what is refused, and what is said -------------------------------------------------------------------------------


def spec_with(turns: str, objective: str = "") -> str:
    return f'[task]\n{objective}\n[task.model]\nname = "gans:Gan"\n[task.data]\nsource = "gans:Rows"\n{turns}'


JUDGE = '[[task.turns]]\nname = "judge"\nobjective = "gans:judged"\nmatch = ["judge.*"]\n'
MAKER = '[[task.turns]]\nname = "maker"\nobjective = "gans:fooled"\nmatch = ["maker.*"]\nevery = 5\n'


def test_turns_are_plain_data_and_travel(tmp_path: Path) -> None:
    spec = parse_spec(spec_with(JUDGE + MAKER, 'objective = "judge"'))
    assert [turn.name for turn in spec.task.turns] == ["judge", "maker"]
    assert spec.task.turns[1].every == 5
    assert spec_from_dict(spec_to_dict(spec)).task == spec.task
    assert take_over(hand_over(spec, tmp_path)).task == spec.task
    objects = Spec(task=gan_task())
    assert take_over(hand_over(objects, tmp_path)).task.turns[0].match == ("judge.*",)


@pytest.mark.parametrize(
    ("turns", "objective", "says"),
    [
        (JUDGE + JUDGE, "", "under a name of its own"),
        (JUDGE + MAKER, 'objective = "next_token"', "no turn's name"),
        (JUDGE + MAKER, 'objective = "maker"', "every 5 steps only"),
        (JUDGE.replace('objective = "gans:judged"\n', ""), "", "nothing says what"),
    ],
)
def test_turns_that_contradict_each_other_are_refused(turns: str, objective: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_spec(spec_with(turns, objective))
    assert says in f"{error.value.what}: {error.value.because}"


def profile_of(task: Task) -> Any:
    return profile_task(task, data_facts(task.data, None))


def with_match(*matches: tuple[str, ...]) -> Task:
    task = gan_task()
    turns = [dataclasses.replace(turn, match=match) for turn, match in zip(task.turns, matches, strict=True)]
    return dataclasses.replace(task, turns=tuple(turns))


def test_every_parameter_has_a_turn_and_every_turn_a_parameter() -> None:
    profile_of(with_match(("judge.*",), ("*",)))  # belongs to the first that matches
    with pytest.raises(ConfigError, match="no turn trains it"):
        profile_of(with_match(("judge.*",), ("maker.0.*",)))
    with pytest.raises(ConfigError, match="trains no parameter"):
        profile_of(with_match(("*",), ("maker.*",)))
    with pytest.raises(ConfigError, match="matches no parameter"):
        profile_of(with_match(("judge.*",), ("makers.*",)))


def test_other_axes_are_closed_with_the_reason() -> None:
    task = gan_task()
    profile = profile_of(task)
    assert {"pp", "cp", "tp"} <= set(profile.closed_axes or {})
    assert "dp_shard" not in (profile.closed_axes or {})
    with pytest.raises(DoesNotFit, match=r"task\.turns"):
        exact_plan(Spec(task=task), PlanSpec(tp=2), profile)
    with pytest.raises(ConfigError, match=r"task\.turns"):
        run_ranks(trained_over_tp, 2)


def trained_over_tp() -> None:
    trained(gan_task(), plan_of(Layout(tp=2), batch=ROWS), 1)


def test_the_profile_adds_up_what_turns_compute() -> None:
    both = profile_of(gan_task())
    alone = [
        profile_of(dataclasses.replace(gan_task(), turns=(), objective=objective)) for objective in (judged, fooled)
    ]
    assert both.forward_flops == sum(profile.forward_flops for profile in alone)
    rare = profile_of(gan_task(every=4))
    assert rare.forward_flops == alone[0].forward_flops + alone[1].forward_flops / 4
    assert "objectives in turn" in both.note


def infinite(model: Gan, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss, weight = fooled(model, batch)
    return loss * torch.inf, weight


def not_a_number() -> str:
    try:
        trained(gan_task(maker=infinite), plan_of(Layout(), batch=ROWS), 1)
    except NumericalStop as stop:
        return f"{stop.what}: {stop.because}"
    return ""


def test_a_loss_that_is_not_finite_names_its_turn() -> None:
    (told,) = run_ranks(not_a_number, 1)
    assert "step 1, turn 'maker'" in told
    assert "by this turn" in told
