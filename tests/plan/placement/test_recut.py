"""Another cut of a batch is made where it pays, is never slower by forecast, and does not move rows to and fro."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.placement.recut import computing_seconds, keeps_passes, recut, rows_of_ranks
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan, rows_refusal

GAIN = 0.1


def even(ranks: int, batch: int, micro_batch: int) -> Plan:
    passes = accumulation_for(batch, ranks, micro_batch)
    return Plan(Layout(dp_replicate=ranks), micro_batch=micro_batch, accumulation=passes, batch_samples=batch)


def after(base: Plan, now: Plan, seconds: list[float], may_leave: bool = True, same_passes: bool = False) -> Plan:
    found = recut(base, now, seconds, GAIN, may_leave=may_leave, same_passes=same_passes)
    return found.plan if found else now


def test_a_slow_rank_gets_fewer_rows_and_them_back_when_it_is_fast_again() -> None:
    base = even(2, 16, 8)
    less = after(base, base, [1.0, 3.0])
    assert less.rows == (12, 4) and less.accumulation == 2  # as large a micro-batch, and more of them
    assert after(base, base, [1.0, 3.0], may_leave=False) is base  # nobody was named
    assert after(base, less, [1.0, 2.5]) is less  # not worth it: 12 in place of 12
    assert after(base, less, [1.0, 1.0]) is base
    assert after(base, base, [1.0, 1.05]) is base
    assert after(base, base, [1.0, 3.0], same_passes=True) is base  # no rank may have more than its passes hold


def test_a_plan_that_the_planner_cut_unevenly_is_what_is_come_back_to() -> None:
    base = dataclasses.replace(even(2, 16, 8), rows=(12, 4), accumulation=2)
    assert after(base, base, [1.0, 3.0]) is base
    other = after(base, base, [1.0, 1.0])
    assert rows_of_ranks(other) == (8, 8)
    assert after(base, other, [1.0, 3.0]) is base


def test_memory_that_was_not_priced_is_not_taken() -> None:
    shards = Layout(dp_shard=2)
    assert keeps_passes(Plan(shards, zero=1)) and not keeps_passes(Plan(shards, zero=2))
    assert not keeps_passes(Plan(shards, zero=1, accumulation=2))
    assert keeps_passes(Plan(Layout(pp=2, dp_shard=2), schedule="gpipe", accumulation=2))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(2, 6).flatmap(lambda n: st.lists(st.floats(0.05, 20.0), min_size=n, max_size=n)),
    st.integers(6, 64),
    st.integers(1, 9),
)
def test_a_cut_gains_what_it_must_and_stays_as_it_is(seconds: list[float], batch: int, micro_batch: int) -> None:
    base = even(len(seconds), batch, micro_batch)
    cut = after(base, base, seconds)
    assert after(base, cut, seconds) is cut  # the same rates ask for no other
    if cut is not base:
        assert computing_seconds(cut, seconds) * (1 + GAIN) < computing_seconds(base, seconds)
        assert rows_refusal(cut) is None and min(cut.rows) >= 1
        assert max(cut.rows) <= cut.micro_batch * cut.accumulation and cut.micro_batch == micro_batch
        assert after(base, cut, [1.0] * len(seconds)) is base
