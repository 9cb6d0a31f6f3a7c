"""The same task on 1, 2 and 4 processes: dp_replicate, dp_shard in every ZeRO class, and their product."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from distributed import run_kept
from rounding import FP64, adam_error, assert_curves_close
from tests_shared import SEQ_LEN, Dropout, decoder_task, run_steps, world_here
from tests_shared import coarse_plan as plan_of
from torch.distributed.tensor import DTensor

from paceline.run.assemble import assemble
from paceline.run.loop.evaluate import evaluate
from paceline.run.loop.loader import BatchStream
from paceline.run.parallel.data.unused_weights import param_groups
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import Task

STEPS, FEW = 50, 10
TASK = decoder_task(model=dataclasses.replace(decoder_task().model, layers=2))
REPLICATED = [Layout(dp_replicate=2), Layout(dp_replicate=4)]
SHARDED = [Layout(dp_shard=2), Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2)]
CASES = [(layout, 3) for layout in REPLICATED] + [(layout, zero) for layout in SHARDED for zero in (1, 2, 3)]
CASES += [(Layout(cp=2), 3), (Layout(cp=2, dp_shard=2), 2)]
SLICE = [(Layout(dp_replicate=2), 3), (Layout(dp_shard=2), 1), (Layout(dp_shard=2), 3),
         (Layout(dp_replicate=2, dp_shard=2), 3), (Layout(cp=2), 3)]  # fmt: skip


def curve(task: Task, plan: Plan, steps: int) -> list[tuple[float, float, float]]:
    """Return (loss, gradient norm, weight) of every step."""
    stats, _ = run_steps(task, plan, steps)
    return [(s.loss, s.grad_norm, s.weight) for s in stats]


def weights_after(task: Task, plan: Plan, steps: int) -> dict[str, torch.Tensor]:
    """Return the full weights after the steps."""
    _, built = run_steps(task, plan, steps)
    whole = {}
    for name, parameter in built.model.named_parameters():
        full = parameter.detach()
        whole[name] = full.full_tensor() if hasattr(full, "full_tensor") else full
    return whole


def fp64(layout: Layout, batch: int = 13, **changes: Any) -> Plan:
    return plan_of(layout, batch, precision="fp64", **changes)


@pytest.fixture(scope="module")
def one_device() -> list[tuple]:
    reference = run_kept(curve, 1, TASK, fp64(Layout()), STEPS)[0]
    assert reference[-1][0] < 0.7 * reference[0][0], "the reference learns"
    return reference


@pytest.mark.parametrize(
    ("layout", "zero"),
    [pytest.param(*case, marks=[pytest.mark.deep] * (case not in SLICE)) for case in CASES],
    ids=str,
)
def test_fifty_losses_lie_on_the_single_device_curve(layout: Layout, zero: int, one_device: list[tuple]) -> None:
    ranks = run_kept(curve, layout.devices, TASK, fp64(layout, zero=zero), STEPS)
    assert all(rank == ranks[0] for rank in ranks), "all ranks report the same numbers"
    assert_curves_close(ranks[0], one_device)


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2)], ids=str)
def test_dropout_masks_and_tied_weights_do_not_depend_on_the_layout(layout: Layout) -> None:
    task = decoder_task(model=Dropout, objective="next_token")
    # Two parts of 6 rows in micro-batches of 3: the same micro-batches as on one device.
    (single,) = run_kept(weights_after, 1, task, fp64(Layout(), batch=12), 3)
    largest = adam_error(task.optimizer.lr, task.optimizer.eps, 3, FP64)  # gradients are means, and below one
    for whole in run_kept(weights_after, 2, task, fp64(layout, batch=12), 3):
        assert whole.keys() == single.keys()
        for name, weight in whole.items():
            torch.testing.assert_close(weight, single[name], rtol=0, atol=largest)


def test_more_ranks_than_rows() -> None:
    task = dataclasses.replace(TASK, global_batch=dataclasses.replace(TASK.global_batch, value=3))
    (single,) = run_kept(curve, 1, task, fp64(Layout(), batch=3), 4)
    for layout in (Layout(dp_replicate=4), Layout(dp_shard=4)):
        ranks = run_kept(curve, 4, task, fp64(layout, batch=3), 4)
        assert_curves_close(ranks[0], single)


def whole_gradients_of(unit: Any) -> int:
    """Return elements of the gradients that FSDP2 holds whole of a unit's weights."""
    held = [each for group in param_groups(unit) for each in group.fsdp_params]
    found = [each.unsharded_accumulated_grad for each in held]
    for each in held:
        weight = getattr(each, "_unsharded_param", None)
        found.append(None if weight is None else weight.grad)
    return sum(grad.numel() for grad in found if grad is not None)


def held_between_micro_batches(zero: int, whole_gradients: bool = False) -> tuple[int, int, int]:
    """Return elements of (whole weights, whole gradients, all weights) on a rank between two micro-batches."""
    plan = plan_of(Layout(dp_shard=2), batch=8, zero=zero, whole_gradients=whole_gradients)
    task, world = decoder_task(), world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    gradients = built.stepper.gradients
    before, seen = gradients.before_micro_batch, []

    def look(last: bool) -> None:
        whole = [p for p in built.model.parameters() if not isinstance(p, DTensor)]
        seen.append((sum(p.numel() for p in whole), sum(whole_gradients_of(unit) for unit in gradients.units)))
        before(last)

    gradients.before_micro_batch = look
    stream = BatchStream(task.data, task.seed, plan, world.rank, world.device)
    built.stepper.step(stream.at(0), 1e-3)
    return *seen[1], sum(p.numel() for p in built.model.parameters())


def test_zero_classes_keep_what_they_say_between_micro_batches() -> None:
    held = {zero: run_kept(held_between_micro_batches, 2, zero)[0] for zero in (1, 2, 3)}
    dropped = run_kept(held_between_micro_batches, 2, 3, True)[0]
    everything = held[1][2]
    assert held[1][:2] == (everything, everything), "ZeRO-1 keeps whole weights and whole gradients for the step"
    assert held[2][:2] == (everything, 0), "ZeRO-2 keeps whole weights, its gradients are shards"
    assert held[3][0] < everything and held[3][1] == 0, "ZeRO-3 has dropped the blocks' weights"
    assert dropped[:2] == (held[3][0], everything), "and may keep their gradients whole all the same"


WHOLE = [Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2), Layout(cp=2), Layout(dp_shard=2, pp=2)]


@pytest.mark.parametrize("layout", WHOLE, ids=str)
def test_whole_gradients_reduced_once_are_those_of_one_device(layout: Layout, one_device: list[tuple]) -> None:
    plan = fp64(layout, zero=3, whole_gradients=True)
    assert plan.accumulation > 1
    ranks = run_kept(curve, layout.devices, TASK, plan, FEW)
    assert_curves_close(ranks[0], one_device[:FEW])


def curve_with_evaluations(task: Task, plan: Plan) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of three steps with an evaluation after each."""
    world = world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    seen = []
    for step in range(3):
        stats = built.stepper.step(stream.at(step * plan.batch_samples), 3e-3)
        seen.append((stats.loss, stats.grad_norm))
        evaluate(built.stepper, task.data, 9, plan.layout.data_rank(world.rank))
    return seen


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_evaluation_leaves_no_trace_in_the_next_step(zero: int) -> None:
    (single,) = run_kept(curve_with_evaluations, 1, TASK, fp64(Layout()))
    ranks = run_kept(curve_with_evaluations, 2, TASK, fp64(Layout(dp_shard=2), zero=zero))
    assert_curves_close(ranks[0], single)
