"""Offload to host memory in the planner: what it saves, what it costs, and when it is chosen."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from plan_examples import block, cluster, measured, memory_terms, opened, plan, profile

from paceline.errors import DoesNotFit
from paceline.plan.cost.components import terms_of
from paceline.plan.cost.memory.offload import HOST_LINK, offload_components
from paceline.plan.cost.pricing import price
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.feasible.refusals import refusal
from paceline.plan.search.search import search
from paceline.spec.forecast import Term
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan, PlanSpec
from paceline.supervise.told.brief import plan_from_dict

LARGE = {"parameters": 100_000_000}


def held(chosen: Plan, kind: str = "cuda", **changes: float) -> dict[str, float]:
    context = PricedTask(profile(4, **changes), cluster(1, kind), 64, 1)
    return {term.name: term.value for term in memory_terms(context, chosen)}


def moved(context: PricedTask, chosen: Plan, busy_seconds: float) -> dict[str, Term]:
    return {t.name: t for t in terms_of(offload_components(context.sheet(chosen), np.array([busy_seconds])), 0)}


def test_state_and_activations_leave_an_accelerator() -> None:
    here, offloaded = held(plan(Layout(), 2), **LARGE), held(plan(Layout(), 2, offload="all"), **LARGE)
    assert here["optimizer state"] == 8 * 401e6 and offloaded["optimizer state"] == Plan().state_bucket_bytes
    # The embedding's own, which is no repeated block, and two blocks' of four.
    assert here["activations"] == 2 * 5 * (4e5 * 4 + 1e5 * 4)
    assert offloaded["activations"] == 2 * 3 * (4e5 * 4 + 1e5 * 4)
    small = held(plan(Layout(), 2, offload="optimizer"))
    assert small["optimizer state"] == 8 * 5e6, "a bucket holds no more than there is"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_on_its_way_to_the_host_stands_beside_the_head(recompute: str) -> None:
    """Two blocks' of 2e6 bytes each, or the four inputs of 2e5, move while a head keeps 8e6 and has as many gradients.

    A block that is computed again comes after the head.
    """
    head = block("head", "head", recomputable=False, saved_elements=2e6, saved_fp32_elements=0.0,
                 transient_elements=2e6)  # fmt: skip
    model = opened(dataclasses.replace(profile(4), blocks=(*profile(4).blocks, head)))
    context = PricedTask(model, cluster(1, "cuda"), 64, 1)
    asked = plan(Layout(), 1, offload="activations", recompute=recompute)
    found = {term.name: term.value for term in memory_terms(context, asked)}
    moves = 2 * (4 * 5e4 if recompute == "full" else 4e5 * 4 + 1e5 * 4)
    assert found["activations"] == 4e5 * 4 + 1e5 * 4 + 4 * 2e6 + moves and found["transients"] == 4 * 2e6


def test_nothing_leaves_a_cpu() -> None:
    here, offloaded = held(plan(Layout(), 2), "cpu"), held(plan(Layout(), 2, offload="all"), "cpu")
    assert offloaded["activations"] == here["activations"]
    assert offloaded["optimizer state"] == 2 * here["optimizer state"], "and a copy visits"


def test_transfer_takes_what_the_link_gives() -> None:
    context = PricedTask(profile(4), cluster(1, "cuda"), 64, 1)
    asked = plan(Layout(), 2, offload="all")
    terms = moved(context, asked, busy_seconds=0.0)
    assert terms["optimizer offload"].value == 2 * 8 * 5e6 / HOST_LINK.value
    assert terms["activation offload"].value == 2 * 64 * 4 * 2e6 / HOST_LINK.value
    assert terms["optimizer offload"].source == "assumed"
    hidden = {name: term.value for name, term in moved(context, asked, busy_seconds=1e3).items()}
    assert hidden["activation offload"] == 0 and hidden["optimizer offload"] > 0
    on_cpu = moved(PricedTask(profile(4), cluster(1), 64, 1), asked, busy_seconds=1e3)
    assert on_cpu["activation offload"].value == 2 * 64 * 4 * 2e6 / (1e10 / 2), "a read and a write of memory each"
    assert moved(context, plan(Layout()), 0.0) == {}


def find(kind: str, gigabytes: float, **constraints: object) -> Plan:
    return search(
        profile(4, **LARGE), cluster(1, kind, gigabytes * 1e9), PlanSpec(**constraints), batch_samples=8, steps=1
    ).best.plan


def test_the_search_turns_to_the_host_only_where_nothing_else_fits() -> None:
    assert find("cuda", 64).offload == "none"
    assert find("cuda", 8).offload == "none", "6.4 GB of state and gradients, and the gradients come as activations go"
    assert find("cuda", 6.5).offload == "optimizer"  # of 6.4 GB of state and gradients, 3.2 are the optimizer's
    assert find("cuda", 64, offload="all", recompute="full").offload == "all"
    with pytest.raises(DoesNotFit):
        find("cuda", 6.5, offload="none")
    with pytest.raises(DoesNotFit):  # it would save nothing
        find("cpu", 6)
    assert find("cpu", 64, offload="optimizer").offload == "optimizer"


def test_refusals_are_named() -> None:
    model = opened(profile(4))
    because = refusal(plan(Layout(), offload="activations", recompute="selective"), model)
    assert because is not None and "selective recompute" in because
    blockless = dataclasses.replace(model, blocks=model.blocks[:1])
    because = refusal(plan(Layout(), offload="all"), blockless)
    assert because is not None and "repeated blocks" in because
    for recompute in ("none", "budget", "full"):
        assert refusal(plan(Layout(), offload="all", recompute=recompute), model) is None


def test_a_budget_mixes_no_selective_recompute_with_offloaded_activations() -> None:
    context = PricedTask(profile(8), cluster(1, "cuda"), 64, 1)
    chosen = context.with_blocks(plan(Layout(), recompute="budget", recompute_budget=0.6, offload="activations"))
    assert set(chosen.recompute_blocks) == {"none", "full"}


def test_a_plan_travels_as_json() -> None:
    chosen = plan(
        Layout(dp_shard=2), recompute="budget", recompute_budget=0.5, recompute_blocks=("none", "full"), offload="all",
        recompute_save=("attention",),
    )  # fmt: skip
    assert plan_from_dict(json.loads(json.dumps(dataclasses.asdict(chosen)))) == chosen
    assert "1 none, 1 full" in str(chosen) and "optimizer state and activations in host memory" in str(chosen)


def test_moving_to_the_host_is_no_computing_in_the_energy_of_a_run() -> None:
    """700 W computing and 100 W waiting: seconds of the transfer draw 100."""
    where = dataclasses.replace(cluster(1, "cuda"), watts_per_device=measured(700.0),
                                waiting_watts_per_device=measured(100.0))  # fmt: skip
    context = PricedTask(profile(4, **LARGE), where, 64, 10)
    bills = []
    for offload in ("none", "optimizer"):
        forecast = price(context, plan(Layout(), 2, offload=offload))
        spent = {term.name: term.value for term in forecast.time}
        waited = spent["operator launches"] + spent["fixed step overhead"] + spent.get("optimizer offload", 0.0)
        watts = 700 - 600 * waited / forecast.step_seconds.value
        assert forecast.kwh.value == pytest.approx(10 * forecast.step_seconds.value * watts / 3.6e6)
        bills.append((forecast.step_seconds.value, forecast.kwh.value, spent))
    (short, less, _), (long, more, spent) = bills
    assert long - short == pytest.approx(spent["optimizer offload"]) and spent["optimizer offload"] > 0.1
    assert more - less == pytest.approx(10 * (long - short) * 100 / 3.6e6)
