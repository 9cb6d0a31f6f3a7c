"""A step on a device whose values nobody can read: the host asks once, and gives the device no copy that it awaits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from no_values import NO_VALUES, Crossings, without_values
from survive_runs import normed
from tests_shared import SEQ_LEN, VOCAB, Dropout, decoder_task, plan_of

import paceline.run.parallel.data.rows_of_all_ranks as rows_of_all_ranks
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.observe.health.meter import HealthMeter
from paceline.run.observe.health.on_the_way import HealthOnTheWay
from paceline.run.parallel.data.rows_of_all_ranks import GatheredRows
from paceline.run.parallel.data.uncut_parameters import WholeGradients
from paceline.run.process.world import World
from paceline.run.replicas.allreduce import ReducedGradients
from paceline.run.survive.health.guard import guard_of
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.survive.health import HealthSpec
from paceline.spec.task import ModelSpec, Task

__all__ = ["without_values"]
EXPERTS = ModelSpec("moe-2m", hidden=32, layers=3, heads=4, kv_heads=2, ffn=24, vocab=VOCAB, balance="bias")
LORA = AdapterSpec(kind="lora", rank=3, init="random", dropout=0.25)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "bf16": ({}, {"precision": "bf16", "recompute": "selective"}),
    "fp16": ({}, {"precision": "fp16"}),
    "clipped": ({"optimizer": OptimizerSpec(lr=1e-3, clip_norm=0.1)}, {"recompute": "full"}),
    "experts": ({"model": EXPERTS}, {"precision": "bf16"}),
    "dropout": ({"model": Dropout}, {}),
    "running statistics": ({"model": normed}, {}),
    "adapter": ({"adapter": LORA}, {}),
    **{name: ({"optimizer": OptimizerSpec(name=name, lr=1e-3)}, {})
       for name in ("lion", "muon", "nadam", "radam", "adamax", "adagrad", "adadelta", "rmsprop")},
}  # fmt: skip


def steps(task: Task, plan: Plan, count: int = 3) -> list[str]:
    """Make steps on the device, and return what the host waits for in the last of them beside the numbers."""
    built = assemble(task, plan, World(0, 1, 0, NO_VALUES), task.data, SEQ_LEN)
    built.stepper.guard = guard_of(HealthSpec(on_nonfinite="skip", on_spike="skip"), plan)
    stream = BatchStream(task.data, task.seed, plan, 0, NO_VALUES)
    crossings = Crossings()
    for step in range(count):
        batch = stream.at(step * plan.batch_samples)
        crossings = Crossings()
        with crossings:
            assert built.stepper.step(batch, 1e-3).updated
    return crossings.seen


@pytest.mark.parametrize("name", CASES)
def test_the_host_asks_for_one_vector_a_step_and_for_nothing_else(without_values: Callable[[], int], name: str) -> None:
    changes, of_plan = CASES[name]
    assert steps(decoder_task(**changes), plan_of(Layout(), batch=5, **of_plan)) == []
    assert without_values() == 3


def test_adafactor_asks_for_the_norms_of_each_parameter(without_values: Callable[[], int]) -> None:
    """torch's own rule does, and the guide says so; the update that a proof holds a run to is that one."""
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        steps(decoder_task(optimizer=OptimizerSpec(name="adafactor", lr=1e-3)), plan_of(Layout(), batch=5))


def test_a_step_whose_health_is_measured_waits_where_its_numbers_are_told(without_values: Callable[[], int]) -> None:
    """Every second step is measured; what blocks a gradient is of, and its share, lies on the device from the start.

    The numbers are asked for once the next step has been made.
    """
    world, task, plan = World(0, 1, 0, NO_VALUES), decoder_task(), plan_of(Layout(), batch=5)
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    meter = built.stepper.health = HealthMeter(built.stepper, world, every=2)
    stream = BatchStream(task.data, task.seed, plan, 0, NO_VALUES)
    coming: HealthOnTheWay | None = None
    for step in range(4):
        batch = stream.at(step * plan.batch_samples)
        with Crossings() as crossings:
            assert built.stepper.step(batch, 1e-3).updated
            if coming is not None:
                assert {"layers.0", "output"} <= coming.arrived().values.keys()
            assert meter.is_measuring == (batch.step % 2 == 0)
            coming = meter.take(batch.step)
            assert (coming is not None) == (batch.step % 2 == 0)
        assert crossings.seen == []
    assert without_values() == 4 + 1, "the numbers of each step, and those of all blocks in one read"


class Inner:
    """Gradients that come together by themselves, and miss none."""

    def finish(self) -> None:
        """Nothing is to be done."""

    def unreached(self) -> int:
        return 0

    def settle(self) -> None:
        """Nothing is to be settled."""


def test_parameters_that_are_whole_on_all_ranks_are_asked_for_where_one_was_missed() -> None:
    reached, missed = (torch.nn.Parameter(torch.ones((), device=NO_VALUES)) for _ in range(2))
    reached.grad = torch.ones_like(reached)
    whole = WholeGradients(Inner(), (reached,), ())
    with Crossings() as crossings:
        whole.finish()
    assert crossings.seen == [] and whole.unreached() == 0
    whole = WholeGradients(Inner(), (reached, missed), ())
    with Crossings() as crossings:
        whole.finish()
        assert whole.unreached() == 1
        with pytest.raises(RuntimeError, match="meta"):
            whole.settle()
    assert crossings.seen == []


class AtOnce:
    """Sums that are there when they begin."""

    def begin(self, buckets: object) -> None:
        """Nothing is to be kept."""

    def start(self, index: int, flat: torch.Tensor, group: object) -> AtOnce:
        return self

    def wait(self) -> None:
        """Nothing is to be waited for."""


def test_copies_are_asked_which_parameters_no_rank_reached_after_the_numbers_of_the_step() -> None:
    model: Any = torch.nn.ParameterList([torch.ones(3, device=NO_VALUES), torch.ones(3, device=NO_VALUES)])
    sums: Any = AtOnce()
    group: Any = None
    gradients = ReducedGradients(model, group, bucket_bytes=1 << 20, sums=sums)
    for reached in (2, 1):
        with Crossings() as crossings:
            gradients.zero()
            gradients.before_micro_batch(last=True)
            for parameter in list(model)[:reached]:
                gradients._hook(0)(parameter)
            gradients.finish()
            assert gradients.unreached() == 2 - reached
        assert [seen for seen in crossings.seen if "non_blocking" not in seen] == []
    with pytest.raises(RuntimeError, match="meta"):
        gradients.settle()


def test_rows_that_are_gathered_are_counted_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_of_all_ranks, "all_gather", lambda *given, **more: None)
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with Crossings() as crossings, pytest.raises(RuntimeError, match="meta"):
        GatheredRows(group)(torch.ones(3, 2, device=NO_VALUES))  # how many rows the others have, the host must know
    assert crossings.seen == []


def test_what_the_host_waits_for_is_seen() -> None:
    host, there = torch.ones(3), torch.ones(3, device=NO_VALUES)
    with Crossings() as crossings:
        torch.tensor([1.0, 2.0], device=NO_VALUES), host.to(NO_VALUES), there.copy_(host)
    assert [seen.split()[0] for seen in crossings.seen] == ["tensor", "_to_copy", "copy_"]
    with Crossings() as crossings:
        host.to(NO_VALUES, non_blocking=True), there.copy_(host, non_blocking=True), there + 1.0
        torch.full((2,), 1.0, device=NO_VALUES), torch.arange(2, device=NO_VALUES), torch.tensor([1.0])
    assert crossings.seen == []
    with pytest.raises(RuntimeError, match="meta"):
        there.sum().item()
