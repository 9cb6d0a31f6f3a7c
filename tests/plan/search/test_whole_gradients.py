"""ZeRO-3 whose gradients stay whole until the last micro-batch: when it is priced, asked for, chosen, and refused."""

import dataclasses
import re

import pytest
from plan_examples import cluster, profile

from paceline.errors import ConfigError
from paceline.plan.cost.memory.usable import HEADROOM
from paceline.plan.search.found import SearchResult
from paceline.plan.search.search import search
from paceline.spec.arguments import make_spec
from paceline.spec.cluster import Cluster, Figure, Link
from paceline.spec.plan import Plan, PlanSpec

# Between devices 1e8 B/s: what 5e6 parameters send beside a pass of compute shows.
SLOW = Link("process", Figure(1e-6, "measured"), Figure(1e8, "measured"))


def found(where: Cluster | None = None, batch: int = 64, **asked: object) -> SearchResult:
    return search(profile(4), where or cluster(4), PlanSpec(**asked), batch_samples=batch, steps=10)


def plans(result: SearchResult) -> list[Plan]:
    return [candidate.plan for candidate in result.candidates]


def test_every_class_of_shards_is_priced_and_one_plan_once() -> None:
    bf16 = {"dp_shard": 4, "recompute": "none", "precision": "bf16"}
    priced = plans(found(**bf16, micro_batch=2))
    assert {(chosen.zero, chosen.whole_gradients) for chosen in priced} == {
        (1, False),
        (2, False),
        (3, False),
        (3, True),
    }
    wide = plans(found(**{**bf16, "precision": "fp32"}, micro_batch=2))
    assert {(chosen.zero, chosen.whole_gradients) for chosen in wide} == {(1, False), (2, False), (3, False)}
    single = plans(found(**bf16, micro_batch=16))
    assert {(chosen.zero, chosen.whole_gradients) for chosen in single} == {(1, False), (2, False), (3, False)}


@pytest.mark.parametrize(("asked", "left"), [("whole", {(1, False), (3, True)}), ("shards", {(2, False), (3, False)})])
def test_what_is_asked_of_gradients_leaves_the_classes_that_hold_them_so(asked: str, left: set) -> None:
    priced = plans(found(dp_shard=4, micro_batch=2, recompute="none", gradients=asked))
    assert {(chosen.zero, chosen.whole_gradients) for chosen in priced} == left
    assert {chosen.reduces_once for chosen in priced} == {asked == "whole"}
    (third,) = plans(found(dp_shard=4, micro_batch=16, recompute="none", gradients=asked, zero=3))
    assert third.zero == 3, "a single micro-batch has such a plan too where it is asked for"


@pytest.mark.parametrize(("zero", "gradients", "other"), [(2, "whole", 1), (1, "shards", 2)])
def test_a_class_that_holds_them_otherwise_is_refused_with_the_one_that_does(
    zero: int, gradients: str, other: int
) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"plan.gradients = '{gradients}' with plan.zero = {zero}")
    ) as error:
        found(zero=zero, gradients=gradients)
    assert f"zero = {other}" in error.value.try_


def test_it_is_chosen_where_whole_weights_do_not_fit_and_links_are_slow() -> None:
    """In bf16 whole weights and shards of gradients take 15 MB, whole gradients and the weights in use 31 MB.

    16 micro-batches send 4 B of gradients in each, or 2 B of weights twice: in two passes, which hide more.
    """
    options = {"dp_shard": 4, "micro_batch": 1, "recompute": "none", "precision": "bf16"}
    roomy = found(cluster(4, "cuda", links=(SLOW,)), **options)
    priced = {(one.plan.zero, one.plan.whole_gradients): one.forecast for one in roomy.candidates}
    first, second, whole, third = priced[1, False], priced[2, False], priced[3, True], priced[3, False]
    by_time = [one.step_seconds.value for one in (first, whole, second, third)]
    by_memory = [one.peak_bytes.high for one in (first, whole, second, third)]
    assert by_time == sorted(by_time) and by_memory == sorted(by_memory, reverse=True)

    def chosen(most: float) -> tuple[int, bool]:
        where = cluster(4, "cuda", links=(SLOW,), memory_bytes=most / (1 - HEADROOM))
        best = found(where, **options).best.plan
        return best.zero, best.whole_gradients

    assert chosen(1.001 * first.peak_bytes.high) == (1, False)
    assert chosen(1.001 * whole.peak_bytes.high) == (3, True)
    assert chosen(1.001 * second.peak_bytes.high) == (2, False)


def test_a_plan_given_whole_keeps_what_it_holds() -> None:
    chosen = plans(found(dp_shard=4, micro_batch=2, recompute="none", zero=3, gradients="whole"))[0]
    assert "ZeRO-3, whole gradients" in str(chosen)
    again = make_spec(
        {"model": "llama-3m", "data": "synthetic"}, plan=chosen, cluster={"device": "a100-80", "devices": 4}
    )
    assert (again.plan.zero, again.plan.gradients) == (3, "whole")
    assert dataclasses.replace(chosen, whole_gradients=False).class_text == "ZeRO-3"
