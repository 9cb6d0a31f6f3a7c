"""Stages of a pipeline: split by cost, filled by micro-batches, refused by name. All without torch."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from paceline.plan.feasible.split import split_by_cost
from paceline.plan.feasible.stages import (
    blocks_per_stage,
    fill_pipeline,
    pipeline_limits,
    stages_of,
    with_pipeline,
)
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.profile import ModelProfile
from paceline.task.models.sizes import NAMED_SIZES
from paceline.task.profile.decoder import profile_decoder

TWO = Plan(Layout(pp=2), accumulation=4, batch_samples=8)


def decoder(layers: int, vocab: int = 1000, tied: bool = True, hidden: int = 64) -> ModelProfile:
    size = dataclasses.replace(
        NAMED_SIZES["llama-1m"], layers=layers, vocab=vocab, hidden=hidden, head_dim=hidden // 4, tied=tied
    )
    return profile_decoder(size, 128)


def largest(profile: ModelProfile, sizes: tuple[int, ...]) -> float:
    """Return the FLOPs of the dearest stage, counted by hand."""
    flops = [b.matmul_flops + b.attention_flops for b in profile.blocks]
    cuts = [0, *itertools.accumulate(sizes)]
    stages = [sum(flops[1 + a : 1 + b]) for a, b in itertools.pairwise(cuts)]
    stages[0] += flops[0]
    stages[-1] += sum(flops[1 + cuts[-1] :])
    return max(stages)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("vocab", [100, 2000, 40_000])
def test_no_split_has_a_cheaper_dearest_stage(stages: int, vocab: int) -> None:
    profile = decoder(8, vocab)
    found = split_by_cost(profile, stages)
    cuts = itertools.combinations(range(1, 8), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, 8))) for cut in cuts]
    assert found in every
    assert largest(profile, found) == pytest.approx(min(largest(profile, sizes) for sizes in every))


def test_the_head_counts_as_work_of_the_last_stage() -> None:
    assert split_by_cost(decoder(8, vocab=100), 2) == (4, 4)
    first, last = split_by_cost(decoder(8, vocab=20_000), 2)
    assert first > last


def test_too_few_blocks_have_no_split() -> None:
    assert split_by_cost(decoder(3), 4) == ()


def test_every_block_is_in_one_stage_of_one_device() -> None:
    plan = dataclasses.replace(TWO, layout=Layout(pp=4), schedule="interleaved", virtual_stages=2)
    assert sorted(index for rank in range(4) for index in stages_of(rank, plan)) == list(range(8))
    assert stages_of(1, plan) == (1, 5)
    assert sum(blocks_per_stage(plan, 13)) == 13


def test_the_planner_fills_the_pipeline_and_names_its_choices() -> None:
    plan = with_pipeline(dataclasses.replace(TWO, accumulation=1), PlanSpec(), decoder(5))
    assert (plan.accumulation, plan.schedule, plan.virtual_stages, sum(plan.stages)) == (2, "1f1b", 1, 5)
    assert "1f1b, 2 stages, blocks 3+2" in str(plan) or "1f1b, 2 stages, blocks 2+3" in str(plan)
    plan = with_pipeline(dataclasses.replace(TWO, accumulation=7), PlanSpec(virtual_stages=2), decoder(5))
    assert (plan.schedule, len(plan.stages), plan.accumulation) == ("interleaved", 4, 8)
    plan = with_pipeline(TWO, PlanSpec(stages="1+4", schedule="gpipe"), decoder(5))
    assert (plan.stages, plan.schedule) == ((1, 4), "gpipe")
    single = Plan(Layout(dp_shard=2))
    assert with_pipeline(single, PlanSpec(), decoder(5)) == single


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("accumulation", range(1, 12))
def test_interleaved_schedules_get_equal_rounds(pp: int, accumulation: int) -> None:
    count = fill_pipeline(accumulation, pp, "interleaved")
    assert count >= max(pp, accumulation) and count % (count // pp) == 0
    assert fill_pipeline(accumulation, pp, "1f1b") == max(pp, accumulation)
    assert fill_pipeline(accumulation, 1, "1f1b") == accumulation


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"accumulation": 1}, "1 micro-batches do not fill a pipeline of 2 (1f1b); 2 do"),
        ({"virtual_stages": 2}, "the schedule 1f1b runs one stage per device"),
        ({"schedule": "interleaved", "virtual_stages": 3}, "5 blocks are fewer than 6 pipeline stages"),
        ({"stages": (3, 3)}, "stages of 3, 3 blocks are not 2 stages of the model's 5"),
        ({"stages": (5, 0)}, "stages of 5, 0 blocks"),
        ({"layout": Layout(), "virtual_stages": 2}, "virtual stages need a pipeline"),
        ({"schedule": "zero-bubble", "layout": Layout(pp=2, dp_shard=2)}, "FSDP2"),
        ({"schedule": "zero-bubble", "recompute": "selective"}, "walks the graph twice"),
        ({"schedule": "zero-bubble", "compile": True}, "compiled blocks"),
    ],
)
def test_refusals_say_why(changes: dict, named: str) -> None:
    because = pipeline_limits(dataclasses.replace(TWO, **changes), decoder(5))
    assert because is not None and named in because


def test_good_plans_are_not_refused() -> None:
    for changes in ({}, {"stages": (1, 4)}, {"schedule": "gpipe"}, {"schedule": "zero-bubble", "recompute": "full"},
                    {"schedule": "interleaved", "virtual_stages": 2}):  # fmt: skip
        assert pipeline_limits(dataclasses.replace(TWO, **changes), decoder(5)) is None


def test_a_split_is_taken_as_the_planner_prints_it() -> None:
    asked = PlanSpec(stages="2+2x1")  # runs of equal stages joined, as in the commands that the planner suggests
    staged = with_pipeline(Plan(Layout(pp=3), accumulation=4, batch_samples=8), asked, decoder(4))
    assert staged.stages == (2, 1, 1)
