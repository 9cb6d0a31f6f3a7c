"""What a run carries along of what else its plan could be: the pipeline's part of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_examples import cluster, opened, plan, profile

from paceline.plan.cost.sheet import PricedTask
from paceline.plan.risk.outlook import outlook_of
from paceline.spec.layout import Layout


def test_a_pipelines_bubble_is_that_of_equal_stages_and_smaller_micro_batches_shorten_it() -> None:
    """`p` equal stages wait for `p - 1` of `m` micro-batches (Narayanan et al. 2021)."""
    context = PricedTask(opened(), cluster(2, "cuda"), 16, 10)
    two = replace(plan(Layout(pp=2), 4, batch=16), schedule="1f1b")
    found = outlook_of(context, two)
    assert found["bubble_seconds"] / found["pass_seconds"] == pytest.approx(1 / 4, rel=0.1)  # the first embeds, too
    answers = {each["text"]: each for each in found["changes"] if each["cause"] == "pipeline"}
    smaller = answers["plan.micro_batch = 2"]
    assert smaller["bubble_seconds"] / smaller["pass_seconds"] < 0.6 * found["bubble_seconds"] / found["pass_seconds"]
    assert answers["plan.schedule = 'zero-bubble'"]["bubble_seconds"] < found["bubble_seconds"]


def test_without_a_pipeline_there_is_no_bubble() -> None:
    found = outlook_of(PricedTask(profile(), cluster(2, "cuda"), 16, 10), plan(Layout(dp_replicate=2), 4, batch=16))
    assert found["bubble_seconds"] == 0.0
    assert all(each["cause"] != "pipeline" for each in found["changes"])


def test_what_a_plan_may_still_do_to_compute_less() -> None:
    """A run in bf16 that recomputed nothing was told to try bf16 and less recompute."""

    def cheaper(**of_plan: object) -> set[str]:
        chosen = replace(plan(Layout(dp_replicate=2), 4, batch=16), **of_plan)
        found = outlook_of(PricedTask(profile(), cluster(2, "cuda"), 16, 10), chosen)
        return {each["text"] for each in found["changes"] if each["cause"] == "cheaper"}

    assert cheaper(precision="bf16", recompute="none", compile=True) == set()
    assert cheaper(precision="fp32", recompute="none") == {"plan.precision = 'bf16'", "plan.compile = true"}
    less = {"plan.recompute = 'none'", "plan.recompute = 'selective'"}
    assert cheaper(precision="bf16", recompute="full", compile=True) == less


def test_less_recompute_takes_less_time_and_more_memory() -> None:
    chosen = replace(plan(Layout(dp_replicate=2), 4, batch=16), recompute="full", precision="bf16", compile=True)
    found = outlook_of(PricedTask(profile(), cluster(2, "cuda"), 16, 10), chosen)
    (none,) = (each for each in found["changes"] if each["text"] == "plan.recompute = 'none'")
    assert none["step_seconds"] < found["step_seconds"] and none["fits"]
