"""What cannot be had, by name."""

from __future__ import annotations

import dataclasses

import pytest
from plan_examples import block, opened, plan, profile

from paceline.plan.feasible.refusals import LAYOUT_REFUSALS, PLAN_REFUSALS, layout_refusal, refusal
from paceline.spec.layout import Layout
from paceline.spec.profile import ModelProfile

SHAPE = opened(profile(6, heads=8, kv_heads=2, experts=6))


@pytest.mark.parametrize(
    ("layout", "because"),
    [
        (Layout(tp=2), None),
        (Layout(tp=3), "8 heads cannot be shared by tp = 3: it must divide 8"),
        (Layout(tp=4), "2 key/value heads cannot be shared by tp = 4: it must divide 2"),
        (Layout(cp=8), None),
        (Layout(dp_shard=3, ep=3), None),
        (Layout(dp_shard=4, ep=4), "6 experts cannot be spread evenly over 4 devices: each holds whole ones"),
    ],
    ids=str,
)
def test_what_a_layout_cannot_split(layout: Layout, because: str | None) -> None:
    assert layout_refusal(plan(layout), SHAPE) == because
    assert refusal(plan(layout), SHAPE) == because


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"micro_batch": 4}, None),
        ({"micro_batch": 4, "layout": Layout(pp=8)}, "the model's 6 blocks are fewer than 8 pipeline stages"),
        ({"micro_batch": 4, "virtual_stages": 2}, "the schedule 1f1b runs one stage per device; interleaved and"),
        ({"micro_batch": 4, "virtual_stages": 3, "schedule": "interleaved"}, None),
        ({"micro_batch": 4, "virtual_stages": 4, "schedule": "interleaved"}, "the model's 6 blocks are fewer than 8"),
        ({"micro_batch": 64}, "1 micro-batches do not fill a pipeline of 2 (1f1b); 2 do"),
        ({"micro_batch": 8, "stages": (4, 1)}, "stages of 4, 1 blocks are not 2 stages of the model's 6"),
        ({"micro_batch": 8, "stages": (6, 0)}, "stages of 6, 0 blocks are not"),
        (
            {"micro_batch": 13, "schedule": "interleaved"},
            "5 micro-batches do not fill a pipeline of 2 (interleaved); 6 do",
        ),
        ({"micro_batch": 4, "layout": Layout(), "virtual_stages": 2}, "virtual stages need a pipeline of pp > 1"),
    ],
    ids=str,
)
def test_what_a_pipeline_cannot_be(changes: dict, because: str | None) -> None:
    chosen = plan(Layout(pp=2), changes["micro_batch"])
    got = refusal(dataclasses.replace(chosen, **changes), SHAPE)
    assert got is None if because is None else got is not None and got.startswith(because)


def test_a_closed_axis_says_so_first_and_unknown_counts_refuse_nothing() -> None:
    assert refusal(plan(Layout(tp=3)), profile(6, heads=8)) == "no rules"
    assert refusal(plan(Layout(tp=3)), opened()) is None, "a traced model has no count of heads"
    assert "no experts to spread" in str(refusal(plan(Layout(dp_shard=2, ep=2)), opened()))


def test_every_limit_lets_one_device_be() -> None:
    alone = ModelProfile("alone", (block("only"),), 7, "traced", {})
    assert [limit(plan(Layout()), alone) for limit in (*LAYOUT_REFUSALS, *PLAN_REFUSALS)] == [None] * len(
        (*LAYOUT_REFUSALS, *PLAN_REFUSALS)
    )
