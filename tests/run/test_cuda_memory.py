"""Host memory beside a GPU: state and activations rest there, batches come from there, and numbers do not change."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from devices import on_every_device
from tests_shared import PaddedText, decoder_task, plan_of, run_steps

from paceline.run.loop.loader import BatchStream
from paceline.run.memory.spent import MemoryMeter, spent_on
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.task.data.read_ahead import ReadAhead


@on_every_device
@pytest.mark.parametrize("offload", ["optimizer", "activations", "all"])
def test_what_rests_on_the_host_changes_no_number(device: str, offload: str) -> None:
    task, world = decoder_task(), join_world(device)
    plain, _ = run_steps(task, plan_of(Layout(), precision="fp32"), 3, world)
    stats, built = run_steps(task, plan_of(Layout(), precision="fp32", offload=offload), 3, world)
    assert [(one.loss, one.grad_norm) for one in stats] == [(one.loss, one.grad_norm) for one in plain]
    moments = [
        value
        for slots in built.optimizer.state.values()
        for name, value in slots.items()
        if isinstance(value, torch.Tensor) and name != "step"
    ]
    rests = "cpu" if offload != "activations" else device
    assert moments and {value.device.type for value in moments} == {rests}


@on_every_device
def test_memory_is_measured(device: str) -> None:
    world = join_world(device)
    meter = MemoryMeter(world.device)
    _, built = run_steps(decoder_task(), plan_of(Layout()), 2, world)
    held, peak = spent_on(built.model, built.optimizer, meter, world.maximum)
    weights = sum(parameter.nbytes for parameter in built.model.parameters())
    assert held["weights"] == held["gradients"] == weights and held["optimizer"] >= 2 * weights
    assert peak >= 4 * weights and sum(held.values()) == pytest.approx(peak)


@on_every_device
def test_batches_that_a_thread_brings_are_the_same(device: str) -> None:
    world, plan = join_world(device), plan_of(Layout())
    prepare: Any = partial(torch.cuda.set_device, world.device) if device == "cuda" else lambda: None
    ahead = ReadAhead(BatchStream(PaddedText(), 1, plan, 0, world.device).at, prepare)
    alone = BatchStream(PaddedText(), 1, plan, 0, torch.device("cpu"))
    for step in range(1, 4):
        position = (step - 1) * plan.batch_samples
        batch = ahead.take(position, step)
        ahead.begin(position + plan.batch_samples, step + 1)
        for micro, other in zip(batch.micro_batches, alone.at(position, step).micro_batches, strict=True):
            assert micro.data["tokens"].device == world.device
            assert torch.equal(micro.data["tokens"].cpu(), other.data["tokens"])
    ahead.close()
