"""A step on a GPU computes what a step on a CPU does in fp64, and lets the host wait once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from devices import on_every_device
from host_waits import HostWaits
from rounding import FP64, MEAN_LOSS_BF16, adam_error, assert_curves_close
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of, run_steps

from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import ModelSpec, Task

STEPS = 4
EXPERTS = ModelSpec("moe-2m", hidden=32, layers=3, heads=4, kv_heads=2, ffn=24, vocab=VOCAB, balance="bias")


def on_one_cpu(task: Task) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return losses, gradient norms and weights of a CPU in fp64 that takes the whole batch at once."""
    stats, built = run_steps(task, plan_of(Layout(), micro_batch=13, precision="fp64"), STEPS)
    weights = {name: parameter.detach().clone() for name, parameter in built.model.named_parameters()}
    return [one.loss for one in stats], [one.grad_norm for one in stats], weights


@on_every_device
@pytest.mark.parametrize("changes", [{}, {"model": EXPERTS}], ids=["dense", "experts"])
def test_a_step_is_that_of_one_cpu_in_fp64(device: str, changes: dict[str, Any]) -> None:
    task = decoder_task(**changes)
    losses, norms, weights = on_one_cpu(task)
    plan = plan_of(Layout(), micro_batch=4, precision="fp64", recompute="selective")
    stats, built = run_steps(task, plan, STEPS, join_world(device))
    assert_curves_close([one.loss for one in stats], losses)
    assert_curves_close([one.grad_norm for one in stats], norms)
    largest = adam_error(task.optimizer.lr, task.optimizer.eps, STEPS, FP64 * max(norms))
    for name, parameter in built.model.named_parameters():
        assert parameter.device.type == device
        torch.testing.assert_close(parameter.detach().cpu(), weights[name], rtol=0, atol=largest, msg=name)


@on_every_device
@pytest.mark.parametrize("changes", [{}, {"model": EXPERTS}], ids=["dense", "experts"])
def test_bf16_means_what_fp64_means(device: str, changes: dict[str, Any]) -> None:
    """In bf16 a GPU takes other kernels: fused attention, and one product for all experts."""
    task = decoder_task(**changes)
    stats, _ = run_steps(task, plan_of(Layout(), precision="bf16"), STEPS, join_world(device))
    assert_curves_close([one.loss for one in stats], on_one_cpu(task)[0], MEAN_LOSS_BF16)


@on_every_device
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "adafactor"])
def test_every_optimizers_kernel_updates_as_on_a_cpu(device: str, name: str) -> None:
    task = decoder_task(optimizer=OptimizerSpec(name=name, lr=1e-3))
    losses, norms, _ = on_one_cpu(task)
    stats, _ = run_steps(task, plan_of(Layout(), micro_batch=5, precision="fp64"), STEPS, join_world(device))
    # An update by signs turns where a gradient is rounding: of losses so much is left after four steps.
    assert_curves_close([one.loss for one in stats], losses, 1e-6 if name == "lion" else 1e-8)
    assert_curves_close([one.grad_norm for one in stats], norms, 1e-5 if name == "lion" else 1e-8)


@contextmanager
def waiting_raises(device: str) -> Iterator[list[str]]:
    """Raise in whatever waits for a GPU but by an event, as the step's one copy does; note it on a CPU."""
    if device == "cpu":
        with HostWaits() as waits:
            yield waits.seen
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield ["torch.Tensor.tolist"]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_every_device
@pytest.mark.parametrize("changes", [{}, {"model": EXPERTS}], ids=["dense", "experts"])
def test_the_host_waits_once_a_step(device: str, changes: dict[str, Any]) -> None:
    if device == "cpu" and changes:
        pytest.skip("a CPU has no grouped product of experts; its waits are counted in test_host_waits.py")
    task, world, plan = decoder_task(**changes), join_world(device), plan_of(Layout(), precision="bf16")
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    stream = BatchStream(task.data, task.seed, plan, 0, world.device)
    batches = [stream.at(step * plan.batch_samples) for step in range(4)]
    for batch in batches[:3]:  # kernels are loaded, the optimizer's state is made
        stats = built.stepper.step(batch, 1e-3)
    with waiting_raises(device) as seen:
        stats = built.stepper.step(batches[3], 1e-3)
    assert seen == ["torch.Tensor.tolist"]
    assert set(stats.seconds) == {"forward_backward", "reduce", "optimizer"}
    assert all(seconds > 0 for seconds in stats.seconds.values()), "the optimizer's are those of the step before"
