"""Steps of different global batches and micro-batches: every layout computes what one device computes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from distributed import run_ranks
from rounding import FP64_TRAINED, assert_curves_close
from tests_shared import SEQ_LEN, Dropout, PaddedText, decoder_task, plan_of, world_here

from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout
from paceline.spec.task import Task

SAMPLES = [6, 13, 2, 9, 1]  # of the steps, one after the other
PASSED_AT_ONCE = [2, 4, 1, 3, 2]


def _task(model: str) -> Task:
    return decoder_task() if model == "decoder" else decoder_task(model=Dropout)


def _steps(layout: Layout, model: str) -> list[tuple[float, float, float]]:
    """Return (loss, weight, norm) of steps whose batches all differ; the plan is for another size than any of them."""
    task, plan, world = _task(model), plan_of(layout, batch=7, precision="fp64"), world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    found, position = [], 0
    for step, (samples, at_once) in enumerate(zip(SAMPLES, PASSED_AT_ONCE, strict=True), 1):
        batch = stream.at(position, step, samples, at_once)
        assert (batch.step, batch.position, batch.samples) == (step, position, samples)
        stats = built.stepper.step(batch, 3e-3)
        assert stats.position_after == position + samples
        position = stats.position_after
        found.append((stats.loss, stats.weight, stats.grad_norm))
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [("decoder", Layout(dp_shard=2)), ("decoder", Layout(pp=2)), ("dropout", Layout(dp_replicate=2))],
)
def test_steps_of_many_sizes_are_one_device(model: str, layout: Layout) -> None:
    expected = _steps(Layout(), model)
    for found in run_ranks(_steps, 2, layout, model):
        assert_curves_close(found, expected, FP64_TRAINED)


def test_the_rows_of_a_step_are_those_at_its_position_whatever_the_sizes_before() -> None:
    plan = plan_of(Layout(dp_replicate=3), batch=7)
    streams = [BatchStream(PaddedText(), 1, plan, rank, torch.device("cpu")) for rank in range(3)]
    read: list[int] = []
    for position, samples in zip(accumulate(SAMPLES, initial=0), SAMPLES, strict=False):
        batches = [stream.at(position, 1, samples, 2) for stream in streams]
        assert len({len(batch.micro_batches) for batch in batches}) == 1, "ranks pass as often as each other"
        assert all(len(micro.ids) <= 2 for batch in batches for micro in batch.micro_batches)
        read += [int(one) for batch in batches for micro in batch.micro_batches for one in micro.ids]
    together = [streams[0].at(0, 1, sum(SAMPLES), 99), *(s.at(0, 1, sum(SAMPLES), 99) for s in streams[1:])]
    assert read == [int(one) for batch in together for micro in batch.micro_batches for one in micro.ids]


def test_without_a_size_a_batch_is_the_plan_s() -> None:
    plan = plan_of(Layout(), batch=7)
    stream = BatchStream(PaddedText(), 1, plan, 0, torch.device("cpu"))
    batch = stream.at(21)
    assert (batch.step, batch.samples, len(batch.micro_batches)) == (4, 7, plan.accumulation)
    assert {micro.step for micro in batch.micro_batches} == {4}
