"""Unequal rows of data ranks: every sample is read once, in its order, and all layouts compute one device's numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import FP64_TRAINED, assert_curves_close
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.evaluate import evaluate
from paceline.run.loop.loader import BatchStream, held_out_batches, held_out_ids
from paceline.run.process.world import World
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.task.data.order.permutation import sample_ids

STEPS, BATCH, HELD_OUT = 3, 13, 11
CPU = torch.device("cpu")
# Layouts of four ranks: some rank has no row at all, or fewer than there are passes, or nearly all of them.
PLANS = [
    (Layout(dp_replicate=4), (7, 0, 1, 5), {}),
    (Layout(dp_replicate=2, dp_shard=2), (1, 2, 8, 2), {"zero": 1}),
    (Layout(dp_shard=4), (0, 0, 12, 1), {"zero": 3}),
    (Layout(dp_shard=2, tp=2), (11, 2), {"zero": 2}),
    (Layout(dp_shard=2, cp=2), (2, 11), {}),
    (Layout(dp_shard=2, pp=2), (12, 1), {}),
]


def plan_with(
    layout: Layout, rows: tuple[int, ...], batch: int = BATCH, micro_batch: int = 2, **changes: object
) -> Plan:
    passes = max(layout.pp, accumulation_for(batch, layout.data_degree, micro_batch, rows))
    plan = plan_of(layout, batch=batch, micro_batch=micro_batch, precision="fp64", **changes)
    return dataclasses.replace(plan, rows=rows, accumulation=passes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum), st.integers(1, 4), st.integers(0, 3000))
def test_every_sample_is_read_once_in_its_order(rows: list[int], micro_batch: int, position: int) -> None:
    batch, ranks = sum(rows), range(len(rows))
    plan = plan_with(Layout(dp_replicate=len(rows)), tuple(rows), batch, micro_batch)
    read = [BatchStream(PaddedText(), 7, plan, rank, CPU).at(position) for rank in ranks]
    assert [sum(len(m.ids) for m in one.micro_batches if m.counts) for one in read] == rows
    assert len({len(one.micro_batches) for one in read}) == 1
    micros = [micro for one in read for micro in one.micro_batches]
    assert max(len(micro.ids) for micro in micros) <= micro_batch
    ids = np.concatenate([micro.ids for micro in micros if micro.counts])
    assert ids.tolist() == sample_ids(7, np.arange(position, position + batch), PaddedText.samples).tolist()
    evaluated = [held_out_batches(PaddedText(), HELD_OUT, plan, rank, CPU) for rank in ranks]
    assert len({len(batches) for batches in evaluated}) == 1
    chosen = [micro for batches in evaluated for micro in batches if micro.counts]
    assert sorted(i for m in chosen for i in m.ids) == sorted(held_out_ids(PaddedText(), HELD_OUT))
    assert all(len(micro.ids) <= micro_batch for micro in chosen)


class Unlike(PaddedText):
    """Rows of different lengths, by id."""

    lengths = tuple(3 + 7 * number % 11 for number in range(PaddedText.samples))


def test_rows_of_different_lengths_are_evaluated_in_the_order_of_these() -> None:
    """They are filled up to the longest beside them: of texts drawn at random half of that were tokens of no sample."""
    plan = plan_with(Layout(dp_replicate=2), (2, 2), batch=4)

    def read_by_both(coupled: bool) -> list[int]:
        parts = [held_out_batches(Unlike(), HELD_OUT, plan, rank, CPU, coupled).parts for rank in (0, 1)]
        return [one for both in zip(*parts, strict=True) for ids, _, counts in both if counts for one in ids.tolist()]

    read, as_ever = read_by_both(False), held_out_ids(Unlike(), HELD_OUT).tolist()
    assert sorted(read) == sorted(as_ever) and read_by_both(True) == as_ever
    lengths = [Unlike.lengths[number] for number in read]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 3


def test_rows_that_do_not_make_up_the_batch_are_refused() -> None:
    for rows in ((7, 7), (13,), (14, -1)):
        plan = dataclasses.replace(plan_with(Layout(dp_shard=2), (7, 6)), rows=rows)
        with pytest.raises(ConfigError, match="rows"):
            BatchStream(PaddedText(), 7, plan, 0, CPU)


def curve(plan: Plan, world: World) -> list[tuple[float, float]]:
    """Return (loss, norm) of every step, and at the end (loss, weight) of an evaluation."""
    task = decoder_task()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    data_rank = plan.layout.data_rank(world.rank)
    stream = BatchStream(task.data, task.seed, plan, data_rank, CPU)
    found = [built.stepper.step(stream.at(step * BATCH), 3e-3) for step in range(STEPS)]
    result = evaluate(built.stepper, task.data, HELD_OUT, data_rank)
    return [*((stats.loss, stats.grad_norm) for stats in found), (result.loss, result.weight)]


def _curves() -> list[list[tuple[float, float]]]:
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), CPU)
    return [curve(plan_with(layout, rows, **changes), world) for layout, rows, changes in PLANS]


def test_unequal_rows_are_one_device_on_every_axis() -> None:
    expected = curve(plan_with(Layout(), ()), World(0, 1, 0, CPU))
    for curves in run_ranks(_curves, 4):
        for (layout, rows, _), found in zip(PLANS, curves, strict=True):
            try:
                assert_curves_close(found, expected, FP64_TRAINED)
            except AssertionError as error:
                error.add_note(f"{layout} with rows {rows}")
                raise
