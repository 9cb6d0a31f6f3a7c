"""What a step tells of its routers beside their loads, entropy and balance, is that of one device on every layout."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of

from paceline.run.loop.routing import RouterWatch
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import ModelSpec, Task
from paceline.verify.compare.layout import compare
from paceline.verify.story.story import story

FINISH = RouterWatch.finish


def task_of(**changes: Any) -> Task:
    sizes = {"hidden": 16, "layers": 3, "heads": 2, "kv_heads": 2, "ffn": 8, "vocab": VOCAB, "experts": 4, "top_k": 2}
    model = ModelSpec("moe-2m", **{**sizes, "balance_weight": 0.3, **changes})
    return decoder_task(model=model, optimizer=OptimizerSpec(lr=1e-2, eps=1e-4))


def twice(what: str) -> None:
    """Have every step tell twice a number of its routers."""

    def finish(self: Any, *rest: Any) -> Any:
        found = FINISH(self, *rest)
        told = getattr(found, what)
        return type(found)(**{**vars(found), what: tuple(2 * e for e in told) if what == "entropy" else 2 * told})

    RouterWatch.finish = finish  # type: ignore[method-assign]


def held(check: str, layouts: list[Layout], what: str = "") -> list[CheckProof]:
    """Return the record of a check of each layout, in the ranks that are running."""
    world = join_world("cpu", threads=1)
    if what:
        twice(what)
    task = task_of()
    plans = [plan_of(layout, batch=7, precision="fp64") for layout in layouts]
    checks = {"steps": compare, "story": story}
    try:
        return [checks[check](task, plan, world, task.data, SEQ_LEN, 2, {}) for plan in plans]
    finally:
        RouterWatch.finish = FINISH  # type: ignore[method-assign]


def test_they_are_those_of_one_device_on_two_ranks() -> None:
    layouts = [Layout(dp_replicate=2), Layout(dp_shard=2, ep=2), Layout(tp=2), Layout(cp=2), Layout(pp=2)]
    for record in run_ranks(held, 2, "steps", layouts)[0]:
        assert record.equal, record.first_difference


@pytest.mark.parametrize(("what", "name"), [
    ("balance", "balance of routers"),
    pytest.param("entropy", "entropy of layers.0.mlp.gate", marks=pytest.mark.deep),
])  # fmt: skip
def test_one_that_is_told_twice_is_named(what: str, name: str) -> None:
    (record,) = run_ranks(held, 2, "steps", [Layout(dp_replicate=2)], what)[0]
    first = record.first_difference
    assert (first.quantity, first.name, first.family) == ("loss", name, "router statistics")
    assert first.ratio == pytest.approx(2) and "by a factor 2" in first.likely


@pytest.mark.deep
def test_the_journal_tells_them_too() -> None:
    layouts = [Layout(dp_replicate=2), Layout(tp=2), Layout(dp_shard=2, ep=2)]
    for record in run_ranks(held, 2, "story", layouts)[0]:
        assert record.equal, record.first_difference
