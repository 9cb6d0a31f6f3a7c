"""Products of the model axes equal one device: where tensor, context and pipeline parallel meet in one layout."""

from __future__ import annotations

import dataclasses

import pytest
from distributed import run_ranks
from tests_shared import SEQ_LEN, decoder_task, world_here
from tests_shared import coarse_plan as plan_of

from paceline.plan.feasible.stages import fill_pipeline
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec
from paceline.verify.compare.layout import compare

LAYOUTS = [Layout(tp=2, cp=2), Layout(tp=2, pp=2), Layout(cp=2, pp=2)]
EIGHT = [Layout(dp_shard=2, tp=2, pp=2), Layout(dp_shard=2, cp=2, tp=2), Layout(cp=2, tp=2, pp=2)]


def piped(layout: Layout) -> Plan:
    """Return an fp64 plan with enough micro-batches for the layout's pipeline."""
    plan = plan_of(layout, precision="fp64")
    return dataclasses.replace(plan, accumulation=fill_pipeline(plan.accumulation, layout.pp, plan.schedule))


def prove(layouts: list[Layout]) -> list[CheckProof]:
    """Compare two steps of a decoder under each layout with one device."""
    task = decoder_task(optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))  # see verify/twin/task.py for eps
    world = world_here()
    return [compare(task, piped(layout), world, task.data, SEQ_LEN, 2) for layout in layouts]


def assert_equal(layouts: list[Layout]) -> None:
    for layout, found in zip(
        layouts, run_ranks(prove, layouts[0].devices, layouts, timeout_seconds=150)[0], strict=True
    ):
        assert found.equal, (str(layout), found.first_difference)


def test_two_model_axes_on_four_ranks() -> None:
    assert_equal(LAYOUTS)


@pytest.mark.deep
def test_three_axes_on_eight_ranks() -> None:
    assert_equal(EIGHT)
