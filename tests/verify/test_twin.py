"""The twin: small enough to check in seconds, and of the same structure as the task."""

from __future__ import annotations

import dataclasses

import pytest
from tests_shared import VOCAB

from paceline.plan.layout import Layout, rows_of
from paceline.plan.plan import Plan
from paceline.task.models.sizes import NAMED_SIZES, resolve_decoder
from paceline.task.task import DataSpec, ModelSpec, OptimizerSpec, Task
from paceline.verify.twin import LARGEST_WORLD, twin_batch, twin_layout, twin_plan, twin_task


@pytest.mark.parametrize("name", NAMED_SIZES)
@pytest.mark.parametrize("vocab", [VOCAB, 257, 4096, 50_257])
def test_structure_is_kept_and_size_is_not(name: str, vocab: int) -> None:
    task = Task(model=ModelSpec(name), data=DataSpec(seq_len=4096))
    twin = twin_task(task, Plan(Layout(dp_shard=2)), vocab)
    full, small = resolve_decoder(task.model, vocab, 4096), resolve_decoder(twin.model, vocab, twin.data.seq_len)
    assert small.heads / small.kv_heads == full.heads / full.kv_heads
    assert small.tied == full.tied
    assert (small.rope_scaling is None) == (full.rope_scaling is None)
    assert small.vocab % 2 == 1 and small.vocab >= vocab, "rows of the embedding are uneven over any layout"
    assert 2 <= small.layers <= full.layers
    assert small.parameters - small.vocab * small.hidden * (1 if small.tied else 2) < 5e5
    assert twin.data.seq_len <= 24


def test_the_optimizer_and_the_users_own_are_kept() -> None:
    optimizer = OptimizerSpec(name="sgd", lr=0.5, clip_norm=2.0, eps=1e-3)
    twin = twin_task(Task(model="mine:build", optimizer=optimizer), Plan(), None)
    assert twin.model == ModelSpec("mine:build")
    assert twin.optimizer == optimizer
    lowered = twin_task(Task(optimizer=dataclasses.replace(optimizer, eps=1e-8)), Plan(), 257).optimizer
    assert lowered.eps == 1e-4, "a tiny eps turns rounding noise into whole updates"


@pytest.mark.parametrize(
    ("layout", "small"),
    [(Layout(dp_shard=1024), Layout(dp_shard=4)), (Layout(dp_replicate=64, dp_shard=8), Layout(2, 2)),
     (Layout(dp_replicate=3), Layout(dp_replicate=3)), (Layout(dp_replicate=2), Layout(dp_replicate=2)),
     (Layout(dp_shard=64, tp=8, pp=4), Layout(dp_shard=2, tp=2, pp=2))],
    ids=str,
)  # fmt: skip
def test_every_axis_of_a_layout_is_kept(layout: Layout, small: Layout) -> None:
    assert twin_layout(layout) == small
    assert twin_layout(layout).devices <= LARGEST_WORLD


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=3)])
def test_ranks_get_different_numbers_of_rows(layout: Layout) -> None:
    rows = [len(rows_of(twin_batch(layout), layout.data_degree, rank)) for rank in range(layout.data_degree)]
    assert len(set(rows)) == 2
    plan = twin_plan(Plan(layout, zero=2, micro_batch=1, accumulation=9, recompute="full", compile=True), "fp64")
    assert (plan.zero, plan.recompute, plan.compile, plan.precision) == (2, "full", False, "fp64")
    assert plan.accumulation > 1 and plan.batch_samples == sum(rows)


def test_a_batch_in_one_piece_stays_in_one_piece() -> None:
    plan = twin_plan(Plan(Layout(dp_replicate=2), micro_batch=32, accumulation=1, batch_samples=64), "fp32")
    assert plan.accumulation == 1
