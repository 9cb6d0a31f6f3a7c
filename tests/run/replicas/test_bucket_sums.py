"""Sums of buckets over copies: FSDP2's own and ours are the same bits, and bf16 leaves nothing out for good."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from copies import began, copies_plan, copies_task, rounded_by_hand, steps_of, whole_weights
from distributed import run_ranks
from rounding import FP64, adam_error

from paceline.run import assemble
from paceline.run.parallel.data.sharding import ShardedGradients
from paceline.run.replicas.allreduce import ReducedGradients
from paceline.run.replicas.bucket_sums import BucketSum, PlainSums, RoundedSums
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.sync import Sync
from paceline.spec.task import Task

ROUNDED = Sync(wire="bf16")
STEPS = 3


def trained(task: Task, plan: Plan) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], str]:
    """Return (loss, gradient norm) of the steps, the weights, and who sums over copies."""
    _, built = began(task, plan)
    numbers = [(stats.loss, stats.grad_norm) for stats in steps_of(built, task, plan, 1, STEPS)]
    return numbers, whole_weights(built), type(built.stepper.gradients).__name__


def freed(task: Task, layout: Layout) -> list[bool]:
    """Return for every ZeRO class whether plain sums in our buckets give the bits that FSDP2's own sums give."""
    of_sync, same = assemble.bucket_sums, []
    for zero in (1, 2, 3):
        assemble.bucket_sums = of_sync
        numbers, weights, by = trained(task, copies_plan(Sync(), layout, zero=zero, micro_batch=1, precision="fp32"))
        assert by == ShardedGradients.__name__
        assemble.bucket_sums = lambda sync: PlainSums()  # the plan frees FSDP2 of the copies, and the hook sums exactly
        ours, held, by = trained(task, copies_plan(ROUNDED, layout, zero=zero, micro_batch=1, precision="fp32"))
        assert by == ReducedGradients.__name__
        same.append(ours == numbers and all(torch.equal(held[name], weight) for name, weight in weights.items()))
    return same


def test_copies_of_shards_sum_the_same_bits_in_our_buckets_as_in_fsdp2() -> None:
    assert run_ranks(freed, 4, copies_task(), Layout(dp_replicate=2, dp_shard=2)) == [[True] * 3] * 4


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=2), pytest.param(Layout(dp_replicate=2, dp_shard=2), marks=pytest.mark.deep)],
    ids=str,
)
def test_rounded_sums_are_those_of_a_plain_loop_that_rounds(layout: Layout) -> None:
    task = copies_task()
    weights = rounded_by_hand(task, 2, STEPS)
    bound = adam_error(task.optimizer.lr, task.optimizer.eps, STEPS, FP64)
    for _, held, _ in run_ranks(trained, layout.devices, task, copies_plan(ROUNDED, layout)):
        for name, weight in held.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=bound)


def summed(make: Callable[[], BucketSum], values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what this rank gets for its values [rounds, ranks, n], and what is left out of three in the end."""
    flat, parameter = torch.zeros(values.shape[-1], dtype=values.dtype), torch.nn.Parameter(torch.zeros(3))
    sums, totals = make(), []
    sums.begin([(flat, {parameter: flat[2:5]})])
    for one in values:
        flat.copy_(one[dist.get_rank()])
        pending = sums.start(0, flat, dist.group.WORLD)
        assert pending is not None
        pending.wait()
        totals.append(flat.clone())
    return torch.stack(totals), sums.kept()[parameter].clone()


def test_what_bf16_leaves_out_is_sent_later() -> None:
    values = torch.randn(5, 2, 8, dtype=torch.float64)
    expected, left = [], torch.zeros(2, 8, dtype=torch.float64)
    for one in values:
        sent = (one + left).bfloat16().double()
        left = one + left - sent
        expected.append(sent.sum(0))
    ranks = run_ranks(summed, 2, RoundedSums, values)
    for rank, (totals, kept) in enumerate(ranks):
        assert torch.equal(totals, torch.stack(expected)) and torch.equal(kept, left[rank, 2:5])
        torch.testing.assert_close(totals.sum(0) + left.sum(0), values.sum((0, 1)), rtol=1e-12, atol=1e-12)
    assert not torch.equal(ranks[0][0], values.sum(1)), "each sum is rounded"


def test_imaginary_parts_are_sent_too() -> None:
    values = torch.randn(1, 2, 8, dtype=torch.complex128)
    sent = torch.view_as_complex(torch.view_as_real(values).bfloat16().double())
    for totals, _ in run_ranks(summed, 2, RoundedSums, values):
        assert torch.equal(totals, sent.sum(1))
