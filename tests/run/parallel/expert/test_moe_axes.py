"""Mixtures of experts under the tensor, pipeline and context axes, and their products with the expert axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from distributed import run_kept
from tests_shared import SEQ_LEN, VOCAB, decoder_task, world_here
from tests_shared import coarse_plan as plan_of
from torch_versions import runs_here

from paceline.plan.feasible.stages import fill_pipeline
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import ModelSpec, Task
from paceline.verify.compare.layout import compare

SMALL = {"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": VOCAB, "experts": 8, "top_k": 2}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}


def moe_task(name: str = "moe-2m", **changes: Any) -> Task:
    """Return a decoder of 8 experts; see verify/twin/task.py for eps."""
    model = ModelSpec(name, **{**SMALL, **changes})
    return decoder_task(model=model, optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))


LOSS = moe_task(balance_weight=0.3)  # heavy, so that a wrong gradient of the balance is no rounding
BIAS = moe_task(balance="bias", scoring="sigmoid")
QWEN = moe_task("qwen3-30b-a3b", top_k=3, balance_weight=0.3)  # norms of single heads
SHARED = moe_task("deepseek-moe-16b", top_k=3, balance_weight=0.3)  # a dense first layer and shared experts


def piped(layout: Layout, batch: int = 13, **changes: Any) -> Plan:
    """Return an fp64 plan with enough micro-batches for the layout's pipeline."""
    plan = plan_of(layout, batch, **{"precision": "fp64", **changes})
    return dataclasses.replace(plan, accumulation=fill_pipeline(plan.accumulation, layout.pp, plan.schedule))


def proofs(cases: list[tuple[Task, Plan]]) -> list[CheckProof]:
    world = world_here()
    return [compare(task, plan, world, task.data, SEQ_LEN, 2) for task, plan in cases]


def unequal(ranks: int, cases: list[tuple[Task, Plan]]) -> list[tuple[Any, ...]]:
    """Return the cases that are not equal to one device, the tokens that each expert got included."""
    cases = [(task, plan) for task, plan in cases if runs_here(plan)]
    found = run_kept(proofs, ranks, cases, timeout_seconds=200)[0]
    assert len(found) == len(cases)
    return [
        (task.model, str(plan), proof.first_difference, proof.differences["router"])
        for (task, plan), proof in zip(cases, found, strict=True)
        if not proof.equal or proof.differences["router"] != 0
    ]


TWO = {
    "tp": [piped(Layout(tp=2)), piped(Layout(tp=2), recompute="full"), piped(Layout(tp=2), recompute="selective")],
    "cp": [piped(Layout(cp=2)), piped(Layout(cp=2), recompute="full"), piped(Layout(cp=2, ep=2), zero=1)],
    "pp": [piped(Layout(pp=2), schedule="gpipe"), piped(Layout(pp=2)), piped(Layout(pp=2), recompute="selective")],
}
FOUR = [
    piped(Layout(dp_shard=2, tp=2, ep=2)),
    piped(Layout(tp=2, pp=2), recompute="full"),
    piped(Layout(cp=2, pp=2, ep=2), zero=2),
]
EIGHT = [
    piped(Layout(dp_shard=2, tp=2, pp=2, ep=2)),
    piped(Layout(cp=2, tp=2, pp=2), recompute="full"),
    piped(Layout(dp_shard=2, cp=2, tp=2, ep=2), zero=1),
    piped(Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2)),
    piped(Layout(dp_replicate=2, cp=2, pp=2, ep=2), recompute="selective"),
]


@pytest.mark.parametrize("axis", TWO)
def test_each_axis_alone_equals_one_device(axis: str) -> None:
    plain, *others = TWO[axis]
    assert not unequal(2, [(task, plain) for task in (LOSS, BIAS, SHARED, QWEN)] + [(SHARED, plan) for plan in others])


@pytest.mark.parametrize("plan", FOUR, ids=lambda plan: str(plan.layout))
def test_products_on_four_ranks(plan: Plan) -> None:
    assert not unequal(4, [(LOSS, plan), (SHARED, plan)])


@pytest.mark.deep
@pytest.mark.parametrize("plan", EIGHT, ids=lambda plan: str(plan.layout))
def test_products_on_eight_ranks(plan: Plan) -> None:
    assert not unequal(8, [(LOSS, plan), (BIAS, plan)])


def test_the_other_schedules_of_a_pipeline() -> None:
    deeper = moe_task(balance_weight=0.3, layers=5)
    zero_bubble = [piped(Layout(pp=2), schedule="zero-bubble", virtual_stages=stages) for stages in (1, 2)]
    interleaved = piped(Layout(pp=2), **INTERLEAVED)
    assert not unequal(2, [(deeper, plan) for plan in (interleaved, *zero_bubble)])
