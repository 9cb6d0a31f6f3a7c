"""Terms say what they are: every one has a kind, seconds have a clock, and energy follows the kinds, not the names."""

from __future__ import annotations

import dataclasses
import itertools
import typing

import pytest
from plan_examples import cluster, measured, opened, plan, profile

from paceline.plan.cost.bill import amounts, busy_share
from paceline.plan.cost.components import Component
from paceline.plan.cost.memory.peak_memory import memory_components
from paceline.plan.cost.memory.usable import HEADROOM
from paceline.plan.cost.pricing import price, step_seconds, time_components
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.software import PACELINE
from paceline.spec.cluster import Cluster
from paceline.spec.forecast import Clock, MemoryKind, Term, TimeKind
from paceline.spec.journal.older import KNOWN, kind_and_clock
from paceline.spec.layout import Layout

MIXTURE = opened(profile(4, experts=4, routed_elements=1e5, expert_parameters=8e5, kv_elements=2e4))
LAYOUT = Layout(dp_shard=2, cp=2, tp=2, pp=2, ep=2)


def a_context(**changes: typing.Any) -> PricedTask:
    software = dataclasses.replace(PACELINE, flushes=True)
    return PricedTask(MIXTURE, cluster(16, "cuda", **changes), 64, 1, "muon", software)


def a_column_of_each(kind: str) -> list[Component]:
    asked = plan(LAYOUT, 1, offload="all", recompute="full")
    memory = memory_components(a_context().sheet(asked))
    if kind == "memory":
        return memory
    room = sum(float(column.values[0]) for column in memory)
    return time_components(a_context(memory_bytes=0.9 * room / (1 - HEADROOM)).sheet(asked))


def test_every_term_has_a_kind_of_its_own_sort_and_seconds_have_a_clock() -> None:
    time, memory = a_column_of_each("time"), a_column_of_each("memory")
    assert {column.kind for column in time} == set(typing.get_args(TimeKind)) - {"data", "learnt"}
    assert {column.kind for column in memory} == set(typing.get_args(MemoryKind)) - {"learnt"}
    assert {column.clock for column in time} == set(typing.get_args(Clock)) - {"none", "data"}
    assert {column.clock for column in memory} == {"none"}


def test_older_journals_are_read_by_the_names_that_terms_have() -> None:
    for column in (*a_column_of_each("time"), *a_column_of_each("memory")):
        assert KNOWN[column.name] == (column.kind, column.clock), column.name
        assert kind_and_clock({"name": column.name}) == (column.kind, column.clock)
    assert kind_and_clock({"name": "learnt from 3 runs here"}) == ("learnt", "none")
    assert kind_and_clock({"name": "attention", "kind": "sync", "clock": "reduce"}) == ("sync", "reduce")
    assert kind_and_clock({"name": "no such term"}) == ("other", "none")


def waiting_cluster() -> Cluster:
    return cluster(1, "cuda", waiting_watts_per_device=measured(100.0))


@pytest.mark.parametrize("offload", ["activations", "optimizer", "all"])
def test_moving_to_the_host_and_back_is_no_computing(offload: str) -> None:
    where, asked = waiting_cluster(), plan(Layout(), 1, offload=offload)
    # Activations that outweigh all arithmetic, so that not all of their way is hidden.
    heavy = profile(4, saved_elements=1e9)
    context = PricedTask(heavy, where, 64, 1)
    priced = price(context, asked)
    moving = sum(term.value for term in priced.time if term.kind == "offload")
    waiting = moving + sum(term.value for term in priced.time if term.kind == "host")
    assert moving > 0
    assert busy_share(priced.time) == pytest.approx(1 - waiting / priced.step_seconds.value)
    _, busy = step_seconds(context, context.sheet(asked).columns)
    assert busy[0] == pytest.approx(busy_share(priced.time)), "what is ranked is what is shown"
    _, kwh, _ = amounts(where, priced.run_seconds.value, busy_share(priced.time))
    assert priced.kwh.value == pytest.approx(kwh)


def test_emptying_a_cache_is_no_computing() -> None:
    term = Term("allocator flushes", 1.0, "", "assumed", kind="allocator", clock="forward_backward")
    assert busy_share([term, Term("products", 3.0, "", "measured", kind="products")]) == 0.75


def test_names_are_for_people() -> None:
    """A term with every word that readers once looked for is what its kind says."""
    words = "optimizer gradient weight copies gathering runtime pipeline communication fixed buffers"
    for kind, other in itertools.permutations(("products", "sync"), 2):
        terms = [Term(words, 1.0, "", "measured", kind=kind), Term(words, 3.0, "", "measured", kind=other)]
        assert busy_share(terms) == (0.25 if kind == "products" else 0.75)
