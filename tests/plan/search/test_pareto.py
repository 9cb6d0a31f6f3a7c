"""The Pareto front against its definition."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from plan_examples import cluster, opened, profile

from paceline.plan.search.pareto import front_of, pareto_front, thinned
from paceline.plan.search.search import search
from paceline.spec.plan import PlanSpec

TABLES = st.tuples(st.integers(1, 40), st.integers(1, 4)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.integers(1, 6).map(float))
)


@given(TABLES)
def test_the_front_is_what_no_row_beats(table: np.ndarray) -> None:
    rows = [tuple(row) for row in table]

    def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return all(a <= b for a, b in zip(one, other, strict=True)) and one != other

    expected = {row for row in rows if not any(beats(other, row) for other in rows)}
    found = pareto_front(table)
    assert {rows[place] for place in found} == expected
    assert len(found) == len(expected), "of equal rows one"
    assert [rows[place] for place in found] == sorted(expected)


@given(TABLES)
def test_a_thinned_front_stands_for_every_row(table: np.ndarray) -> None:
    kept = table[thinned(table, 1.5)]
    assert all((kept <= 1.5 * row).all(axis=1).any() for row in table)
    for place, row in enumerate(kept):
        assert not (kept[:place] <= 1.5 * row).all(axis=1).any()


def test_the_front_of_a_cluster_leaves_out_what_is_unknown() -> None:
    shape = opened(profile(4, heads=8, kv_heads=4))
    result = search(shape, cluster(4), PlanSpec(), batch_samples=64, steps=10)
    places, names = front_of(result.candidates.values)
    assert names == ("time", "memory", "energy") and len(places) > 1
    assert result.candidates.values.time[places[0]] == result.candidates.values.time.min()
    unknown = cluster(4, watts_per_device=cluster().carbon_g_per_kwh)
    result = search(shape, unknown, PlanSpec(), batch_samples=64, steps=10)
    assert front_of(result.candidates.values)[1] == ("time", "memory")
    assert math.isnan(result.candidates.values.energy[0])
