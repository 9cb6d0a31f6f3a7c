"""A memory budget for activations: which block gets which mode of recompute, and what that costs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import cluster, measured, memory_terms, opened, plan, profile

from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.cost.memory.recompute import fill_budget, modes_in_order
from paceline.plan.cost.model_parts import MODES
from paceline.plan.cost.pricing import price
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.explain.difference import difference, plan_options
from paceline.plan.placement.traffic import axis_traffic
from paceline.plan.search.search import search
from paceline.plan.search.space import BUDGETS
from paceline.plan.search.values import TIE_RATIO
from paceline.spec.arguments import plan_spec
from paceline.spec.layout import Layout
from paceline.spec.plan import SAVED_KINDS, Plan, PlanSpec
from paceline.supervise.told.brief import plan_from_dict

# Of a block, in the order of MODES: the bytes that it keeps, and the seconds that it computes again.
Choices = tuple[tuple[float, float], ...]
ROUND: Choices = ((100.0, 0.0), (40.0, 1.0), (10.0, 9.0))


def filled(kinds: Sequence[tuple[int, Choices]], budget_bytes: float) -> list[tuple[float, ...]]:
    """Return how many blocks of each kind get each mode: none, selective, full."""
    numbers = np.array([[number for number, _ in kinds]], dtype=float)
    kept, seconds = (
        np.array([[[choices[mode][which] for _, choices in kinds]] for mode in range(3)]) for which in (0, 1)
    )
    found = fill_budget(numbers, kept, seconds, np.array([float(budget_bytes)]))
    return [tuple(found[:, 0, kind]) for kind in range(len(kinds))]


def test_budget_by_hand() -> None:
    three = [(3, ROUND)]
    assert filled(three, 0) == [(0, 0, 3)], "less than the least is the least"
    assert filled(three, 60) == [(0, 1, 2)]
    assert filled(three, 120) == [(0, 3, 0)]
    assert filled(three, 200) == [(1, 2, 0)]
    assert filled(three, 300) == [(3, 0, 0)]


def test_a_mode_that_no_trade_favours_is_not_taken() -> None:
    dear = (90.0, 8.0)  # nearly all of the bytes for little of the time
    assert filled([(2, (ROUND[0], dear, ROUND[2]))], 110) == [(1, 0, 1)]
    larger = (120.0, 1.0)  # outputs of products may be more than what blocks keep without recompute
    assert filled([(2, (ROUND[0], larger, ROUND[2]))], 1000) == [(2, 0, 0)]


def test_of_equal_blocks_the_earlier_ones_keep_more() -> None:
    counts = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])  # of two kinds of blocks
    assert modes_in_order([1, 0, 1, 0, 1], counts) == ["selective", "none", "full", "selective", "full"]


pairs = st.tuples(st.integers(1, 30), st.integers(0, 30)).map(lambda pair: (float(pair[0]), float(pair[1])))
kinds = st.tuples(st.integers(1, 2), st.tuples(pairs, pairs, pairs))


@settings(max_examples=150, deadline=None)
@given(st.lists(kinds, min_size=1, max_size=3), st.integers(0, 120))
def test_a_budget_is_kept_and_is_within_one_step_of_the_best(kinds: list[tuple[int, Choices]], limit: int) -> None:
    found = filled(kinds, limit)
    assert [sum(counts) for counts in found] == [number for number, _ in kinds]
    taken = [(counts, choices) for counts, (_, choices) in zip(found, kinds, strict=True)]
    held, seconds = (
        sum(n * choice[which] for counts, choices in taken for n, choice in zip(counts, choices, strict=True))
        for which in (0, 1)
    )
    blocks = [choices for number, choices in kinds for _ in range(number)]
    least = sum(min(kept for kept, _ in own) for own in blocks)
    assert held <= max(limit, least) + 1e-6
    every = list(itertools.product(*blocks))
    possible = [sum(s for _, s in way) for way in every if sum(kept for kept, _ in way) <= max(limit, least)]
    step = max(max(s for _, s in own) - min(s for _, s in own) for own in blocks)
    assert min(possible) <= seconds <= min(possible) + step


EXPERTS = Layout(dp_shard=2, ep=2)
SMALL = dataclasses.replace(cluster(1).device, memory_bytes=measured(3e8))


def context(devices: int = 1, layers: int = 8) -> PricedTask:
    return PricedTask(opened(profile(layers)), cluster(devices), 64, 1)


def budget(context: PricedTask, part: float, layout: Layout | None = None, **changes: object) -> Plan:
    return context.with_blocks(plan(layout or Layout(), recompute="budget", recompute_budget=part, **changes))


def kept(context: PricedTask, chosen: Plan) -> float:
    """Return the bytes that repeated blocks keep of a sample between the passes."""
    sheet = context.sheet(chosen)
    return float(sheet.over_modes(sheet.kept_bytes)[0])


def test_modes_keep_within_the_budget_and_cost_less_with_more_of_it() -> None:
    here = context()
    everything, last = kept(here, plan(Layout())), float("inf")
    for part in (0.05, 0.2, 0.4, 0.6, 0.8, 1.0):
        chosen = budget(here, part)
        assert len(chosen.recompute_blocks) == 8
        floor = kept(here, plan(Layout(), recompute="full"))
        assert kept(here, chosen) <= max(floor, part * everything * (1 + 1e-9))
        (seconds,) = here.sheet(chosen).busy_seconds
        assert seconds <= last
        last = seconds
    assert budget(here, 1.0).recompute_blocks == ("none",) * 8
    assert set(budget(here, 0.01).recompute_blocks) == {"full"}


def test_prices_lie_between_those_of_full_recompute_and_none() -> None:
    here = context()
    half, none, full = budget(here, 0.5), plan(Layout()), plan(Layout(), recompute="full")
    memory = [sum(term.value for term in memory_terms(here, one)) for one in (full, half, none)]
    times = [price(here, one).step_seconds.value for one in (none, half, full)]
    assert memory == sorted(memory) and times == sorted(times)
    assert len(set(memory)) == len(set(times)) == 3
    # A budget that happens to give all blocks one mode costs what that mode costs.
    all_full = budget(here, 0.01)
    assert price(here, all_full).step_seconds.value == pytest.approx(times[-1], rel=1e-12)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2, tp=2), Layout(cp=2, pp=2), Layout(tp=2, pp=2)])
def test_blocks_of_one_mode_cost_what_the_mode_costs(kind: str, precision: str, layout: Layout) -> None:
    """Every term of a budget's plan, in every layout: a list of modes is priced like the mode that all of it is."""
    here = PricedTask(
        opened(profile(8, kv_elements=1e4, attention_out_elements=5e4)), cluster(layout.devices, kind), 64, 1
    )
    for mode in MODES:
        named = plan(layout, 2, recompute=mode, precision=precision, **({"stages": (3, 5)} if layout.pp > 1 else {}))
        listed = dataclasses.replace(named, recompute="budget", recompute_blocks=(mode,) * 8)
        one, other = price(here, named), price(here, listed)
        for terms, others in ((one.time, other.time), (one.memory, other.memory)):
            expected = {term.name: pytest.approx(term.value, rel=1e-12, abs=1e-15) for term in others}
            found = {term.name: term.value for term in terms if term.value or term.name in expected}
            assert {name: found.get(name, 0.0) for name in expected} == expected


def test_settled_blocks_are_priced_as_they_are() -> None:
    """What is priced is what runs: a list of modes is priced block by block, whatever the budget says."""
    here = context(2)
    layout, same = Layout(pp=2), {"stages": (4, 4), "accumulation": 8, "batch": 64}
    modes = ("full", "none", "none", "selective", "selective", "selective", "full", "none")
    chosen = plan(layout, 8, recompute="budget", recompute_blocks=modes, **same)
    assert here.with_blocks(chosen) == chosen
    named = {mode: here.sheet(plan(layout, 8, recompute=mode, **same)) for mode in MODES}
    sheet = here.sheet(chosen)
    for rank, own in enumerate((modes[:4], modes[4:])):
        for values in (lambda one: one.busy_seconds, lambda one: one.over_modes(one.kept_bytes)):
            # Both ranks have four equal blocks, the first the embedding besides.
            of_mode = {mode: [values(one)[0], values(one)[-1]] for mode, one in named.items()}
            mean = sum(of_mode[mode][rank] for mode in own) / 4
            assert values(sheet)[rank] == pytest.approx(mean, rel=1e-12)


def test_every_pipeline_rank_has_a_budget_of_its_own() -> None:
    here = context(2)
    chosen = budget(here, 0.5, Layout(pp=2), stages=(2, 6), accumulation=8)
    for number, blocks in ((2, slice(0, 2)), (6, slice(2, 8))):
        alone = PricedTask(opened(profile(number)), cluster(1), 64, 1)
        assert chosen.recompute_blocks[blocks] == budget(alone, 0.5).recompute_blocks
    assert "full" not in chosen.recompute_blocks  # half of the bytes is more than selective recompute keeps


def test_interleaved_stages_of_a_rank_share_a_budget() -> None:
    here = context(2)
    chosen = budget(here, 0.5, Layout(pp=2), stages=(1, 2, 3, 2), virtual_stages=2, schedule="interleaved")
    for number, blocks in ((4, (0, 3, 4, 5)), (4, (1, 2, 6, 7))):
        alone = PricedTask(opened(profile(number)), cluster(1), 64, 1)
        modes = tuple(chosen.recompute_blocks[block] for block in blocks)
        assert modes == budget(alone, 0.5).recompute_blocks


def test_plans_of_the_search_are_priced_as_what_they_run_as() -> None:
    """The columns' choice, the plan that they become, its way through the brief, and that plan's price alone."""
    here = context(4)
    setting = {"batch_samples": 64, "steps": 1}
    found = search(here.profile, here.cluster, PlanSpec(recompute="budget"), **setting)
    for candidate in found.candidates[::7]:
        chosen = plan_from_dict(json.loads(json.dumps(dataclasses.asdict(candidate.plan))))
        assert chosen == candidate.plan and len(chosen.recompute_blocks) == 8
        assert here.with_blocks(dataclasses.replace(chosen, recompute_blocks=())) == chosen
        again = price(here, chosen)
        assert again.step_seconds.value == pytest.approx(candidate.forecast.step_seconds.value, rel=1e-12)
        assert again.peak_bytes.value == pytest.approx(candidate.forecast.peak_bytes.value, rel=1e-12)
    assert any(len(set(candidate.plan.recompute_blocks)) > 1 for candidate in found.candidates[::7])
    refused = search(
        here.profile, dataclasses.replace(here.cluster, device=SMALL), PlanSpec(recompute="budget"), **setting
    )
    assert len(refused.refused.too_large) and len(refused.refused[len(refused.refused) - 1].plan.recompute_blocks) == 8


def test_a_device_of_unknown_rates_counts_operations() -> None:
    where = cluster(1)
    unknown = dataclasses.replace(where.device, matmul_flops={}, matmul_source="unknown")
    here = PricedTask(opened(profile(8)), dataclasses.replace(where, device=unknown), 64, 1)
    assert budget(here, 0.4).recompute_blocks == budget(context(), 0.4).recompute_blocks


def test_what_selective_recompute_keeps_can_be_named() -> None:
    here = PricedTask(opened(profile(4, attention_out_elements=5e4)), cluster(1), 64, 1)
    asked = {save: plan(Layout(), recompute="selective", recompute_save=save) for save in
             (SAVED_KINDS, ("attention",), ("products",))}  # fmt: skip
    held = {save: kept(here, chosen) for save, chosen in asked.items()}
    assert held[SAVED_KINDS] == 4 * 4 * 2e5
    assert held["attention",] == 4 * 4 * (5e4 + 5e4)
    assert held["products",] == 4 * 4 * (2e5 - 5e4)
    again = {save: here.sheet(chosen).busy_seconds[0] for save, chosen in asked.items()}
    full = here.sheet(plan(Layout(), recompute="full")).busy_seconds[0]
    assert again[SAVED_KINDS] < again["products",] < again["attention",] < full


def test_the_search_takes_a_budget_or_tries_some() -> None:
    setting = {"batch_samples": 64, "steps": 1}
    asked = search(profile(8), cluster(1), PlanSpec(recompute="budget", recompute_budget=0.4), **setting)
    assert {c.plan.recompute_budget for c in asked.candidates} == {0.4}
    assert all(len(c.plan.recompute_blocks) == 8 for c in asked.candidates)
    left_open = search(profile(8), cluster(1), PlanSpec(recompute="budget"), **setting)
    assert {c.plan.recompute_budget for c in left_open.candidates} == set(BUDGETS)
    assert "budget recompute" in str(left_open.best.plan)
    auto = search(profile(8), cluster(1), PlanSpec(), **setting)
    assert {c.plan.recompute for c in auto.candidates} == {"none", "selective", "full"}


def test_the_search_turns_to_budgets_where_memory_makes_the_best_plan_recompute() -> None:
    setting = {"batch_samples": 8, "steps": 1}
    model = profile(8, saved_elements=4e8, selective_elements=2e8, input_elements=5e7, moved_elements=1e9)
    for gigabytes, budgets in ((64, False), (9, True)):
        where = cluster(1, memory_bytes=gigabytes * 1e9)
        auto = search(model, where, PlanSpec(), **setting)
        assert (auto.best.plan.recompute == "budget") == budgets
        best = []
        for mode in MODES:
            with contextlib.suppress(DoesNotFit):
                best.append(search(model, where, PlanSpec(recompute=mode), **setting).best.forecast.step_seconds.value)
        seconds = auto.best.forecast.step_seconds.value
        assert seconds * TIE_RATIO < min(best) if budgets else seconds == min(best)
        assert sorted(c.plan.recompute_budget for c in auto.candidates)[-1] == (0.75 if budgets else 0)
    bubble = search(opened(model), cluster(2, memory_bytes=9e9), PlanSpec(pp=2, schedule="zero-bubble"), **setting)
    assert {c.plan.recompute for c in bubble.candidates} <= {"none", "full"}, "its limits hold"


def test_what_runs_again_is_sent_again() -> None:
    """What an axis sends under a budget lies between its modes' own, by the blocks that have each.

    A selective block keeps what attention gave, so it exchanges no keys again; its tokens go to their experts again.
    """
    where = PricedTask(opened(profile(4, kv_elements=1e4, routed_elements=1e5, experts=4)), cluster(2), 64, 1)
    mixed = {"recompute": "budget", "recompute_blocks": ("none", "selective", "full", "full")}
    for layout, axis, part in ((Layout(tp=2), "tp", 3 / 4), (Layout(cp=2), "cp", 1 / 2), (EXPERTS, "ep", 3 / 4)):
        ways = ({"recompute": "none"}, {"recompute": "full"}, mixed)
        none, full, sent = (axis_traffic(where, plan(layout, **way))[0] for way in ways)
        assert sent.axis == axis and full.bytes_per_step > none.bytes_per_step
        expected = none.bytes_per_step + part * (full.bytes_per_step - none.bytes_per_step)
        assert sent.bytes_per_step == pytest.approx(expected)


def test_options_bring_back_a_plan_with_a_budget() -> None:
    """The command that tries a plan asks for its budget and its offload."""
    where, setting = cluster(1, "cuda"), {"batch_samples": 64, "steps": 1}
    asked = PlanSpec(recompute="budget", recompute_budget=0.4, offload="optimizer", micro_batch=4)
    chosen = search(profile(8), where, asked, **setting).best.plan
    options = dict(option.removeprefix("plan.").split("=") for option in plan_options(chosen, has_experts=False))
    again = plan_spec(", ".join(f"{name}={value}" for name, value in options.items()))
    assert search(profile(8), where, again, **setting).best.plan == chosen
    other = dataclasses.replace(chosen, recompute_budget=0.75)
    assert difference(chosen, other) == "budget recompute 0.75"


def test_contradictions_are_named() -> None:
    setting = {"batch_samples": 64, "steps": 1}
    with pytest.raises(ConfigError, match=r"recompute_budget = 0\.5 with recompute = 'full'"):
        search(profile(2), cluster(1), PlanSpec(recompute="full", recompute_budget=0.5), **setting)
    with pytest.raises(ConfigError, match=r"recompute_save = \[\]"):
        search(profile(2), cluster(1), PlanSpec(recompute="selective", recompute_save=()), **setting)
