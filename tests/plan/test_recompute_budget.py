"""A memory budget for activations: which block gets which mode of recompute, and what that costs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import block, cluster, opened, plan, profile

from paceline.errors import ConfigError
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.memory import memory_terms
from paceline.plan.cost.recompute import BUDGETS, Choice, again_seconds, fill_budget, kept_bytes
from paceline.plan.cost.total import price
from paceline.plan.layout import Layout
from paceline.plan.plan import PlanSpec
from paceline.plan.search import search

FULL, SELECTIVE, NONE = Choice("full", 10.0, 9.0), Choice("selective", 40.0, 1.0), Choice("none", 100.0, 0.0)


def test_budget_by_hand() -> None:
    three = [(NONE, SELECTIVE, FULL)] * 3
    assert fill_budget(three, 0) == ("full",) * 3, "less than the least is the least"
    assert fill_budget(three, 60) == ("selective", "full", "full")
    assert fill_budget(three, 120) == ("selective",) * 3
    assert fill_budget(three, 200) == ("none", "selective", "selective")
    assert fill_budget(three, 300) == ("none",) * 3


def test_a_mode_that_no_trade_favours_is_not_taken() -> None:
    dear = Choice("selective", 90.0, 8.0)  # nearly all of the bytes for little of the time
    assert fill_budget([(NONE, dear, FULL)] * 2, 110) == ("none", "full")


choices = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 30)).map(lambda pair: Choice("x", float(pair[0]), float(pair[1]))),
    min_size=1,
    max_size=3,
    unique_by=lambda choice: choice.kept_bytes,
).map(lambda found: [dataclasses.replace(one, mode=str(index)) for index, one in enumerate(found)])


@settings(max_examples=150, deadline=None)
@given(st.lists(choices, min_size=1, max_size=5), st.integers(0, 120))
def test_a_budget_is_kept_and_is_within_one_step_of_the_best(options: list[list[Choice]], limit: int) -> None:
    modes = fill_budget(options, float(limit))
    taken = [next(c for c in own if c.mode == mode) for own, mode in zip(options, modes, strict=True)]
    held, seconds = sum(c.kept_bytes for c in taken), sum(c.seconds for c in taken)
    least = sum(min(c.kept_bytes for c in own) for own in options)
    assert held <= max(limit, least) + 1e-6
    every = itertools.product(*options)
    possible = [sum(c.seconds for c in way) for way in every if sum(c.kept_bytes for c in way) <= max(limit, least)]
    step = max(max(c.seconds for c in own) - min(c.seconds for c in own) for own in options)
    assert min(possible) <= seconds <= min(possible) + step


def context(devices: int = 1, layers: int = 8, **changes: object) -> Context:
    return Context(opened(profile(layers)), cluster(devices, **changes), 64, 1)


def budget(context: Context, part: float, layout: Layout | None = None, **changes: object):
    return context.with_blocks(plan(layout or Layout(), recompute="budget", recompute_budget=part, **changes))


def kept(context: Context, chosen: object) -> float:
    """Return the bytes that repeated blocks keep of a sample between the passes."""
    groups = context.by_mode(chosen, context.whole).items()
    return sum(n * kept_bytes(b, chosen, mode) for mode, again in groups for b, n in again.shapes)


def test_modes_keep_within_the_budget_and_cost_less_with_more_of_it() -> None:
    here = context()
    everything, last = kept(here, plan(Layout())), float("inf")
    for part in (0.05, 0.2, 0.4, 0.6, 0.8, 1.0):
        chosen = budget(here, part)
        assert len(chosen.recompute_blocks) == 8
        floor = kept(here, plan(Layout(), recompute="full"))
        assert kept(here, chosen) <= max(floor, part * everything * (1 + 1e-9))
        seconds = here.busy_seconds(here.whole, chosen)
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


def test_every_pipeline_rank_has_a_budget_of_its_own() -> None:
    here = context(2)
    chosen = budget(here, 0.5, Layout(pp=2), stages=(2, 6), accumulation=8)
    for part, blocks in zip(here.stages(chosen), (slice(0, 2), slice(2, 8)), strict=True):
        modes = chosen.recompute_blocks[blocks]
        assert {m: len(again.blocks) for m, again in here.by_mode(chosen, part.part).items()} == {
            mode: modes.count(mode) for mode in modes
        }
    assert "full" not in chosen.recompute_blocks  # half of the bytes is more than selective recompute keeps


def test_what_selective_recompute_keeps_can_be_named() -> None:
    one = block("layers.0", attention_out_elements=5e4)
    both = plan(Layout(), recompute="selective")
    attention = dataclasses.replace(both, recompute_save=("attention",))
    products = dataclasses.replace(both, recompute_save=("products",))
    assert kept_bytes(one, both, "selective") == 4 * 2e5
    assert kept_bytes(one, attention, "selective") == 4 * (5e4 + 5e4)
    assert kept_bytes(one, products, "selective") == 4 * (2e5 - 5e4)
    here = Context(opened(profile(4)), cluster(1), 64, 1)
    rates, counts = here.rates("fp32"), here.whole.recomputable_counts
    again = {
        one.recompute_save: again_seconds(counts, one, "selective", rates, 256) for one in (both, attention, products)
    }
    full = again_seconds(counts, both, "full", rates, 256)
    assert again[both.recompute_save] < again[("products",)] < again[("attention",)] < full


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


def test_contradictions_are_named() -> None:
    setting = {"batch_samples": 64, "steps": 1}
    with pytest.raises(ConfigError, match=r"recompute_budget = 0\.5 with recompute = 'full'"):
        search(profile(2), cluster(1), PlanSpec(recompute="full", recompute_budget=0.5), **setting)
    with pytest.raises(ConfigError, match=r"recompute_save = \[\]"):
        search(profile(2), cluster(1), PlanSpec(recompute="selective", recompute_save=()), **setting)
