"""The copy of the state that saves beside training are written from, in the memory of a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from plan_examples import cluster, plan, profile

from paceline.checkpoint.beside.stage import HostStage
from paceline.plan.cost.pricing import price
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.learn.observation import Observation, machine_key, observation_from_dict
from paceline.plan.learn.recall import forecast_runs
from paceline.plan.planned import plan_task
from paceline.spec.layout import Layout
from paceline.spec.load import load_spec
from paceline.spec.run import RunSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.units import Amount

COPY = "copy for saves"


def memory_of(layout: Layout, kind: str = "cpu", *, stages: bool = True) -> dict[str, float]:
    context = PricedTask(profile(4), cluster(2, kind), 64, 1, stages=stages)
    forecast = price(context, plan(layout, 2))
    assert forecast.peak_bytes.value == pytest.approx(sum(term.value for term in forecast.memory))
    return {term.name: term.value for term in forecast.memory}


def test_the_copy_is_the_state_that_a_rank_holds_once_more() -> None:
    """Five million weights in fp32 with both moments are 60 MB a copy, and 30 a shard of two."""
    assert memory_of(Layout(dp_replicate=2))[COPY] == 12 * 5e6
    assert memory_of(Layout(dp_shard=2))[COPY] == 6 * 5e6
    assert COPY not in memory_of(Layout(dp_replicate=2), stages=False)
    assert COPY not in memory_of(Layout(dp_replicate=2), "cuda"), "there it is in the host's memory, not the device's"


def test_the_stage_of_a_run_holds_as_much() -> None:
    model = torch.nn.Linear(300, 200, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    (state,) = optimizer.state.values()
    stage = HostStage()
    stage.take(1, {"weight": model.weight.detach(), "m": state["exp_avg"], "v": state["exp_avg_sq"]}, {})
    assert stage.bytes == 12 * model.weight.numel()


@pytest.mark.parametrize(
    ("changes", "steps", "stages"),
    [
        ({}, 101, True),
        ({}, 100, False),  # the first one is the last one, and no step comes any more
        ({"checkpoint_every": None}, 1000, False),
        ({"checkpoint_every": Amount(1, "epochs")}, 1, True),  # how many steps these are is not asked
        ({"checkpoints": CheckpointsSpec(asynchronous="off")}, 1000, False),
        ({"checkpoint_every": None, "checkpoints": CheckpointsSpec(memory_every=Amount(2, "steps"))}, 10, True),
    ],
)
def test_a_run_that_saves_on_its_way_holds_it(changes: dict[str, object], steps: int, stages: bool) -> None:
    assert dataclasses.replace(RunSpec(), **changes).stages_within(steps) is stages  # type: ignore[arg-type]


def test_a_plan_of_a_task_counts_it_and_what_runs_taught_is_compared_with_it() -> None:
    asked = ["task.model=llama-1m", "task.global_batch=16 samples", "cluster.device=cpu", "cluster.devices=2"]
    long, short = (plan_task(load_spec(None, [*asked, f"task.stop={steps} steps"])) for steps in (300, 60))
    (copy,) = [term for term in long.forecast.memory if term.name == COPY]
    state = sum(term.value for term in long.forecast.memory if term.kind in ("weights", "optimizer"))
    assert copy.value == state and COPY not in {term.name for term in short.forecast.memory}
    here = cluster(2, host="node-1")
    chosen = plan(Layout(dp_replicate=2), 2)
    run = Observation(
        date="2026-01-01T00:00:00+00:00", run="runs/a", machine=machine_key(here), name="a", profile=profile(4),
        optimizer="adamw", plan=chosen, devices=2, devices_per_node=2, steps=50, step_seconds=1.0, spread=0.02,
        peak_bytes=1e9, staged=True,
    )  # fmt: skip
    without = dataclasses.replace(run, staged=False)
    more, less = forecast_runs([run, without], lambda one: here)
    assert more.forecast_bytes - less.forecast_bytes == pytest.approx(12 * 5e6)
    assert observation_from_dict(run.as_dict()) == run


def test_peaks_of_earlier_releases_are_not_learnt_from_on_a_cpu() -> None:
    """They may hold the copy or not: taken for peaks without it they would have had the copy counted twice."""
    for kind, kept in (("cpu", None), ("cuda", 1e9)):
        here = cluster(2, kind, host="a-cpu-node")
        run = Observation(
            date="2026-01-01T00:00:00+00:00", run="runs/a", machine=machine_key(here), name="a", profile=profile(4),
            optimizer="adamw", plan=plan(Layout(dp_replicate=2), 2), devices=2, devices_per_node=2, steps=50,
            step_seconds=1.0, spread=0.02, peak_bytes=1e9,
        )  # fmt: skip
        record = {name: value for name, value in run.as_dict().items() if name != "staged"}
        assert observation_from_dict(record).peak_bytes == kept
        assert observation_from_dict(run.as_dict()).peak_bytes == 1e9
