"""A measurement of health has the same numbers on every layout, and those of a plain computation on one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from distributed import run_kept
from rounding import FP64_TRAINED
from tests_shared import SEQ_LEN, decoder_task, plan_of, world_here
from torch import nn

from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.observe.health.judge import HealthJudge
from paceline.run.observe.health.meter import HealthMeter, block_of
from paceline.run.observe.health.on_the_way import MeasuredHealth
from paceline.run.observe.health.run_health import TrainingHealth
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.optimizer.schedule import learning_rate
from paceline.task.rules import Rules


class Relus(nn.Module):
    """Two layers with units of which some never give anything, declared as columns and rows."""

    paceline_rules = Rules(tensor={"blocks.*.up": "column", "blocks.*.down": "row"})

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)
        with torch.no_grad():
            self.up.bias[:12] = -1000.0  # units that are dead

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.act(self.up(hidden)))


def measured(task: Task, plan: Plan, steps: int = 2) -> list[MeasuredHealth | None]:
    """Return what was measured in each step; every second one is."""
    world = world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    meter = built.stepper.health = HealthMeter(built.stepper, world, every=2)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    found = []
    for step in range(1, steps + 1):
        lr = learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1)
        stats = built.stepper.step(stream.at((step - 1) * plan.batch_samples), lr)
        coming = meter.take(stats.step)
        found.append(coming.arrived() if coming else None)
    return found


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for block, own in found.items():
        assert own.keys() == expected[block].keys(), block
        for name, value in own.items():
            assert value == pytest.approx(expected[block][name], rel=FP64_TRAINED, abs=1e-12), (block, name)


@pytest.fixture(scope="module")
def one_device() -> Any:
    first, second = measured(decoder_task(), plan_of(Layout(), precision="fp64"))
    assert first is None and second is not None
    return second.values


LAYOUTS = [Layout(dp_replicate=2), Layout(dp_shard=2), Layout(tp=2), Layout(cp=2), Layout(pp=2)]


LATER = [Layout(dp_replicate=2), Layout(tp=2), Layout(cp=2)]


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[pytest.mark.deep] * (each in LATER)) for each in LAYOUTS], ids=str
)
def test_every_layout_measures_the_same(layout: Layout, one_device: Any) -> None:
    """13 samples are no even share of two ranks, and in micro-batches of 2 some ranks have rows that stand in."""
    found = run_kept(measured, layout.devices, decoder_task(), plan_of(layout, precision="fp64"))
    assert all(second is not None and not second.values for _, second in found[1:])
    expected = one_device
    if layout.pp > 1:
        kept = ("grad_norm", "weight_norm", "update_ratio")
        expected = {block: {name: own[name] for name in kept} for block, own in one_device.items() if kept[0] in own}
        assert "stages" in found[0][1].absent["activation_rms"] and "stages" in found[0][1].absent["logit_max"]
    axes = {"attention_max": layout.cp, "logit_max": layout.cp * layout.tp}
    left = {block: {name: value for name, value in own.items() if axes.get(name, 1) == 1}
            for block, own in expected.items()}  # fmt: skip
    expected = {block: own for block, own in left.items() if own}
    assert_same(found[0][1].values, expected)


def test_numbers_are_those_of_a_plain_computation() -> None:
    torch.manual_seed(0)
    task = decoder_task()
    plan = plan_of(Layout(), precision="fp64")
    world = world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    meter = built.stepper.health = HealthMeter(built.stepper, world, every=1)
    stream = BatchStream(task.data, task.seed, plan, 0, world.device)
    before = {name: p.detach().clone() for name, p in built.model.named_parameters()}
    kept: dict[str, torch.Tensor] = {}

    def look(correction: float) -> None:
        kept.update({n: p.grad * correction for n, p in built.model.named_parameters() if p.grad is not None})

    built.stepper.observe = look
    stats = built.stepper.step(stream.at(0), 1e-3)
    coming = meter.take(stats.step)
    assert coming is not None
    found = coming.arrived()
    after = dict(built.model.named_parameters())

    def norm(of: dict[str, torch.Tensor], block: str) -> float:
        return math.sqrt(sum(float(t.double().square().sum()) for name, t in of.items() if block_of(name) == block))

    for block in {block_of(name) for name in before}:
        own, moved = found.values[block], {name: after[name].detach() - before[name] for name in before}
        assert own["grad_norm"] == pytest.approx(norm(kept, block))
        assert own["weight_norm"] == pytest.approx(norm(before, block))
        assert own["update_ratio"] == pytest.approx(norm(moved, block) / norm(before, block))
    assert math.hypot(*(own.get("grad_norm", 0.0) for own in found.values.values())) == pytest.approx(stats.grad_norm)


def eager(q: torch.Tensor, k: torch.Tensor, head: int) -> torch.Tensor:
    """Return all causal scores of one head, one by one as a textbook has them."""
    keys = k[:, head * k.shape[1] // q.shape[1]]
    scores = q[:, head] @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.tril(scores)


def test_scores_and_logits_are_those_of_a_plain_computation() -> None:
    """The sequence has fewer tokens than the sample, so the largest score of the head is that of all its scores."""
    task, plan, world = decoder_task(), plan_of(Layout(), precision="fp64"), world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    meter = built.stepper.health = HealthMeter(built.stepper, world, every=1)
    stream = BatchStream(task.data, task.seed, plan, 0, world.device)
    model = built.model
    seen: dict[int, list[torch.Tensor]] = {}
    logits: list[torch.Tensor] = []
    for at, layer in enumerate(model.layers):
        layer.self_attn.attend.register_forward_pre_hook(
            lambda _m, given, at=at: seen.setdefault(at, []).append(
                eager(*given[:2], head=(1 + names[at]) % given[0].shape[1])))  # fmt: skip
    head = (model.embed_tokens if model.config.tied else model.lm_head).weight.detach().clone()
    model.norm.register_forward_hook(lambda _m, _i, out: logits.append((out.detach()[:, -4:] @ head.t()).abs().amax()))
    names = [meter.blocks.index(f"layers.{at}") for at in range(len(model.layers))]
    stats = built.stepper.step(stream.at(0), 1e-3)
    coming = meter.take(stats.step)
    assert coming is not None
    found = coming.arrived()
    for at in range(len(model.layers)):
        expected = max(float(each.detach().abs().amax()) for each in seen[at])
        assert found.values[f"layers.{at}"]["attention_max"] == pytest.approx(expected)
    assert found.values["output"]["logit_max"] == pytest.approx(max(map(float, logits)))


def dead(plan: Plan) -> Any:
    found = measured(decoder_task(model=Relus, objective="next_token"), plan)[1]
    return found.values if found else None


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), pytest.param(Layout(tp=2), marks=pytest.mark.deep)], ids=str)
def test_dead_units_are_counted_over_ranks(layout: Layout) -> None:
    alone = dead(plan_of(Layout(), precision="fp64"))
    assert alone["blocks.0"]["dead_share"] == 12 / 32
    assert_same(run_kept(dead, 2, plan_of(layout, precision="fp64"))[0], alone)


def test_blocks_are_named_by_the_first_number_of_a_parameter() -> None:
    names = ["model.layers.3.mlp.up.weight", "layer1.0.conv.weight", "embed.weight", "0.weight", "scale"]
    assert [block_of(name) for name in names] == ["model.layers.3", "layer1.0", "embed", "0", "scale"]


class TwoNames(nn.Module):
    """A layer of a block stands by a name of its own too, as a shortcut does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(64, 16), _Block(), nn.Linear(16, 64)
        self.shortcut = self.block.down

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(self.block(hidden) + self.shortcut(torch.cat((hidden, hidden), dim=-1)))


def test_a_module_of_two_names_is_measured() -> None:
    task = decoder_task(model=TwoNames, objective="next_token")
    plan = plan_of(Layout(), precision="fp64")
    (health,) = (each for each in run_kept(measured, 1, task, plan)[0] if each is not None)
    assert {"block", "shortcut", "head"} <= set(health.values)


class RunsLater(Relus):
    """Its second block runs once somebody says so; nobody knows of its units before."""

    runs = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](self.embed(tokens))
        return self.head(self.blocks[1](hidden) if self.runs else hidden)


def waits(task: Task, plan: Plan, steps: int) -> tuple[list[int], list[Any]]:
    """Return how often ranks waited for each other's numbers in each measured step, and what was measured."""
    world = world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    meter = built.stepper.health = HealthMeter(built.stepper, world, every=1)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    counts, found = list[int](), list[Any]()
    asked = World.maximum
    for step in range(1, steps + 1):
        RunsLater.runs = step > 1
        stats = built.stepper.step(stream.at((step - 1) * plan.batch_samples), 1e-3)
        counts.append(0)

        def counted(own: World, values: list[float]) -> list[float]:
            counts[-1] += 1
            return asked(own, values)

        World.maximum = counted  # type: ignore[method-assign]
        coming = meter.take(stats.step)
        World.maximum = asked  # type: ignore[method-assign]
        assert coming is not None
        found.append(coming.arrived().values)
    return counts, found


def test_ranks_wait_for_each_others_numbers_in_the_first_measurement_alone() -> None:
    task = decoder_task(model=Relus, objective="next_token")
    for counts, _ in run_kept(waits, 2, task, plan_of(Layout(dp_shard=2), precision="fp64"), 3):
        assert counts == [1, 0, 0]


def test_units_that_run_later_are_measured_from_the_measurement_after_on() -> None:
    task = decoder_task(model=RunsLater, objective="next_token")
    plan = plan_of(Layout(dp_replicate=2), precision="fp64")
    for at, (counts, found) in enumerate(run_kept(waits, 2, task, plan, 4)):
        assert counts[1:] == [0, 0, 0]
        dead = [{block: own["dead_share"] for block, own in each.items() if "dead_share" in own} for each in found]
        first = dict.fromkeys(("blocks.0", "output"), 12 / 32)
        both = {"blocks.0": 12 / 32, "blocks.1": 12 / 32, "output": 12 / 32}
        assert dead == ([first, first, both, both] if at == 0 else [{}] * 4)


def test_a_measurement_is_told_with_the_next_step_or_where_none_follows() -> None:
    task, plan, world = decoder_task(), plan_of(Layout(), precision="fp64"), world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    health = TrainingHealth(2, HealthJudge())
    health.of(built.stepper, world)
    stream = BatchStream(task.data, task.seed, plan, 0, world.device)
    told = []
    for step in range(4):
        stats = built.stepper.step(stream.at(step * plan.batch_samples), 1e-3)
        told.append([each.step for each in health.after(stats)])
    assert told == [[], [], [2], []]
    assert [each.step for each in health.rest()] == [4] and health.rest() == []
