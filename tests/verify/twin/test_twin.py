"""The twin: small enough to check in seconds, and of the same structure as the task."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from tests_shared import VOCAB, PaddedText

from paceline.plan.feasible.refusals import layout_refusal
from paceline.spec.layout import Layout, rows_of
from paceline.spec.plan import Plan
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.models.shape import DecoderConfig
from paceline.task.models.sizes import NAMED_SIZES, resolve_decoder
from paceline.task.profile.decoder import profile_decoder
from paceline.verify.process.every import every_layout
from paceline.verify.twin.fold import for_twin
from paceline.verify.twin.layout import LIGHT_WORLD, light_layouts, smallest_layouts, twin_layout, twin_layouts
from paceline.verify.twin.task import twin_batch, twin_plan, twin_task


@pytest.mark.parametrize("name", NAMED_SIZES)
@pytest.mark.parametrize("vocab", [VOCAB, 257, 4096, 50_257])
def test_structure_is_kept_and_size_is_not(name: str, vocab: int) -> None:
    if 0 < NAMED_SIZES[name].vocab < vocab:
        pytest.skip("the published vocabulary has fewer values than these data")
    task = Task(model=ModelSpec(name), data=DataSpec(seq_len=4096))
    twin = twin_task(task, Plan(Layout(dp_shard=2)), vocab)
    full, small = resolve_decoder(task.model, vocab, 4096), resolve_decoder(twin.model, 0, twin.data.seq_len)
    assert small.heads / small.kv_heads == full.heads / full.kv_heads
    assert small.tied == full.tied
    assert (small.rope_scaling is None) == (full.rope_scaling is None)
    assert small.vocab % 2 == 1 and small.vocab >= min(vocab, 521), "rows of the embedding are uneven over any layout"
    assert 2 <= small.layers <= full.layers
    assert small.parameters < 1e6
    assert twin.data.seq_len <= 24


def test_token_ids_are_folded_into_the_vocabulary_of_the_twin() -> None:
    task = Task(model=ModelSpec("llama-1m", vocab=7), data=PaddedText())
    whole, folded = PaddedText(), for_twin(PaddedText(), task)
    ids = np.arange(5)
    ours, theirs = folded.read(ids), whole.read(ids)
    assert folded.vocab == 7 and folded.samples == whole.samples and folded.items_per_sample == whole.items_per_sample
    assert torch.equal(ours["tokens"], theirs["tokens"] % 7) and int(theirs["tokens"].max()) > 7
    counted = theirs["labels"] >= 0
    assert torch.equal(ours["labels"][counted], theirs["labels"][counted] % 7)
    assert not counted.all() and (ours["labels"][~counted] == -100).all()
    for model in (ModelSpec("llama-1m", vocab=VOCAB), ModelSpec("llama-1m"), ModelSpec("mine:build")):
        assert for_twin(whole, dataclasses.replace(task, model=model)) is whole


def test_the_optimizer_and_the_users_own_are_kept() -> None:
    optimizer = OptimizerSpec(name="sgd", lr=0.5, clip_norm=2.0, eps=1e-3)
    twin = twin_task(Task(model="mine:build", optimizer=optimizer), Plan(), None)
    assert twin.model == ModelSpec("mine:build")
    assert twin.optimizer == optimizer
    lowered = twin_task(Task(optimizer=dataclasses.replace(optimizer, eps=1e-8)), Plan(), 257).optimizer
    assert lowered.eps == 1e-4, "a tiny eps turns rounding noise into whole updates"


@pytest.mark.parametrize(
    ("layout", "small"),
    [(Layout(dp_shard=1024), [Layout(dp_shard=4)]), (Layout(dp_replicate=64, dp_shard=8), [Layout(2, 2)]),
     (Layout(dp_replicate=3), [Layout(dp_replicate=3)]), (Layout(dp_replicate=2), [Layout(dp_replicate=2)]),
     (Layout(dp_shard=5), [Layout(dp_shard=3)]), (Layout(dp_shard=10), [Layout(dp_shard=3)]),
     (Layout(dp_replicate=127, tp=2), [Layout(dp_replicate=2, tp=2)]), (Layout(cp=5), [Layout(cp=3)]),
     (Layout(dp_shard=2, cp=4), [Layout(dp_shard=2, cp=3)]), (Layout(cp=4, tp=2), [Layout(cp=4, tp=2)]),
     (Layout(dp_shard=64, tp=8, pp=4), [Layout(dp_shard=2, tp=4, pp=2), Layout(dp_shard=2, tp=2, pp=3)]),
     (Layout(tp=6, pp=5), [Layout(tp=3, pp=2), Layout(tp=2, pp=3)]),
     (Layout(4, 8, 2, 8, 16),
      [Layout(2, 2, 2, 2, 2), Layout(cp=2, tp=4, pp=2), Layout(cp=2, tp=2, pp=3)])],
    ids=str,
)  # fmt: skip
def test_every_axis_of_a_layout_is_kept_and_three_of_those_that_split_a_model(
    layout: Layout, small: list[Layout]
) -> None:
    assert list(twin_layouts(layout)) == small
    for axis, degree in layout.mesh_shape.items():
        most = max(twin.mesh_shape[axis] for twin in small)
        assert (most > 1) == (degree > 1)
        assert axis.startswith("dp") or most >= min(3, degree)


def test_every_two_axes_meet_in_a_light_twin() -> None:
    degrees = {"dp_replicate": (1, 2, 8), "dp_shard": (1, 2, 6), "cp": (1, 2, 4), "tp": (1, 2, 8), "pp": (1, 2, 5)}
    for layout in (Layout(**dict(zip(degrees, each, strict=True))) for each in itertools.product(*degrees.values())):
        light = light_layouts(layout)
        assert all(twin.devices <= LIGHT_WORLD for twin in light)
        used = [axis for axis, degree in layout.mesh_shape.items() if degree > 1]
        for pair in itertools.combinations(used, 2):
            assert any(all(twin.mesh_shape[axis] > 1 for axis in pair) for twin in light), (str(layout), pair)
        for axis in used:
            deepest = [max(twin.mesh_shape[axis] for twin in twins) for twins in (light, twin_layouts(layout))]
            assert deepest[0] == deepest[1], (str(layout), axis)
        assert all(twin.ep == 1 for twin in light)
    experts = light_layouts(Layout(2, 4, 2, 2, 4, ep=4))
    assert any(twin.ep > 1 and twin.tp > 1 for twin in experts) and any(twin.ep > 1 < twin.pp for twin in experts)


def test_every_axis_is_at_work_in_one_of_the_smallest_twins() -> None:
    degrees = {"dp_replicate": (1, 2, 8), "dp_shard": (1, 2, 6), "cp": (1, 2, 4), "tp": (1, 2, 8), "pp": (1, 2, 5)}
    for layout in (Layout(**dict(zip(degrees, each, strict=True))) for each in itertools.product(*degrees.values())):
        smallest = smallest_layouts(layout)
        used = {axis for axis, degree in layout.mesh_shape.items() if degree > 1}
        at_work = [{axis for axis, degree in twin.mesh_shape.items() if degree > 1} for twin in smallest]
        assert set().union(*at_work) == used and all(twin.devices <= 4 for twin in smallest), str(layout)
        if "dp_replicate" in used and used != {"dp_replicate"}:
            assert {"dp_replicate"} not in at_work, "copies of a model that is split are summed by FSDP2"
    assert [str(twin) for twin in smallest_layouts(Layout(dp_shard=4, ep=4))] == ["dp_shard=2 ep=2"]


def decoder_of(task: Task, vocab: int) -> DecoderConfig:
    assert isinstance(task.model, ModelSpec) and isinstance(task.data, DataSpec)
    return resolve_decoder(task.model, vocab, task.data.seq_len)


@pytest.mark.parametrize("name", ["llama-1m", "llama-124m", "llama-3b", "llama-405b", "mixtral-8x22b"])
def test_the_twin_can_have_every_layout_that_the_task_can(name: str) -> None:
    task = Task(model=ModelSpec(name), data=DataSpec(seq_len=1680))
    full = profile_decoder(decoder_of(task, 257), 1680)
    plans = [Plan(layout) for ranks in range(2, 9) for layout in every_layout(full, ranks)]
    plans = [plan for plan in plans if plan.layout.pp <= full.repeated_blocks]
    possible = [plan for plan in plans if layout_refusal(plan, full) is None]
    assert len(possible) > 70 and any(plan.layout.tp > 1 for plan in possible)
    for plan in possible:
        twin = twin_task(task, plan, 257, layout=plan.layout)
        small = decoder_of(twin, 257)
        profile = profile_decoder(small, twin.data.seq_len)
        assert layout_refusal(plan, profile) is None
        assert small.heads / small.kv_heads == decoder_of(task, 257).heads / decoder_of(task, 257).kv_heads
        assert small.layers > plan.layout.pp or small.layers == decoder_of(task, 257).layers
        assert small.parameters < 3e6


@pytest.mark.parametrize("name", ["llama-405b", "mixtral-8x22b"])
def test_stages_and_shards_of_a_giant_stay_uneven(name: str) -> None:
    task = Task(model=ModelSpec(name), data=DataSpec(seq_len=4096))
    layout = Layout(dp_shard=16, tp=8, pp=4)
    small = decoder_of(twin_task(task, Plan(layout), 257), 257)
    assert twin_layout(layout) == Layout(dp_shard=2, tp=4, pp=2)
    assert small.layers % 2 and small.vocab % 2 and small.layers >= 3
    exact = decoder_of(twin_task(task, Plan(Layout(pp=4)), 257, layout=Layout(pp=4)), 257)
    assert exact.layers == 5


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


def test_a_twin_mixes_the_modes_of_a_memory_budget() -> None:
    plan = Plan(recompute="budget", recompute_budget=0.5, recompute_blocks=("full",) * 80)
    assert twin_plan(plan, "fp64", layers=3).recompute_blocks == ("none", "selective", "full")
    offloaded = dataclasses.replace(plan, offload="activations")
    assert twin_plan(offloaded, "fp64", layers=3).recompute_blocks == ("none", "full", "none")
    assert twin_plan(plan, "fp64").recompute_blocks == plan.recompute_blocks, "a model that is used as it is"
    assert twin_plan(offloaded, "fp64", layers=3).offload == "activations"


def test_a_twin_of_unequal_rows_has_unequal_rows():
    rows = (30, 30, 30, 6)
    plan = Plan(Layout(dp_shard=4), micro_batch=8, accumulation=4, batch_samples=96, rows=rows)
    for layout in (Layout(dp_shard=2), Layout(dp_shard=4)):
        twin = twin_plan(plan, "fp64", layout=layout)
        assert sum(twin.rows) == twin.batch_samples and len(twin.rows) == layout.data_degree
        assert max(twin.rows) >= 3 * min(twin.rows) >= 3
        assert max(twin.rows) <= twin.micro_batch * twin.accumulation
    assert twin_plan(plan, "fp64", layout=Layout(tp=2)).rows == ()
