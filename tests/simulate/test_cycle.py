"""The closed forms of a cycle, against a walk through it block by block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.simulate.cycle import Cycle

CYCLES = st.builds(
    lambda block, copies, copy_stall, store_stall, share: Cycle(
        block, copies, copy_stall if copies > 1 else 0.0, store_stall, share * block
    ),
    st.integers(1, 40).map(float),
    st.integers(1, 4),
    st.integers(0, 5).map(float),
    st.integers(0, 9).map(float),
    st.sampled_from([0.0, 0.25, 1.0]),
)


def walk(cycle: Cycle, until: float) -> tuple[float, float, float]:
    """Return work done, work copied and work stored at a time, one block after the other."""
    now = work = copied = stored = 0.0
    writing: list[tuple[float, float]] = []
    for stall, stores in stalls(cycle):
        length = min(cycle.block, until - now)
        now, work = now + length, work + length
        if now + (cycle.copy_stall if stores is not None else 0.0) > until or length < cycle.block:
            break
        copy_end = now + cycle.copy_stall
        if copy_end <= until:
            copied = work
        now += stall
        if stores and now <= until:
            writing.append((now + cycle.write, work))
        if now >= until:
            break
    for safe, done in writing:
        if safe <= until:
            stored = done
    return work, copied, stored


def stalls(cycle: Cycle) -> Iterator[tuple[float, bool]]:
    """Yield the stall after each block, and whether it ends with a checkpoint."""
    while True:
        for index in range(cycle.copies):
            last = index == cycle.copies - 1
            yield cycle.copy_stall + (cycle.store_stall if last else 0.0), last


@settings(max_examples=300, deadline=None)
@given(CYCLES, st.integers(0, 2000).map(lambda quarter: quarter / 4))
def test_closed_forms_are_what_a_walk_through_the_cycle_finds(cycle: Cycle, elapsed: float) -> None:
    work, copied, stored = walk(cycle, elapsed)
    assert cycle.work_at(elapsed) == pytest.approx(work, abs=1e-6)
    assert cycle.copied_at(elapsed) == pytest.approx(copied, abs=1e-6)
    assert cycle.stored_at(elapsed) == pytest.approx(stored, abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(CYCLES, st.integers(1, 4000).map(lambda quarter: quarter / 4))
def test_the_time_for_work_is_the_first_at_which_it_is_done(cycle: Cycle, work: float) -> None:
    end = cycle.elapsed_for(work)
    assert cycle.work_at(end) == pytest.approx(work, abs=1e-6)
    assert cycle.work_at(end - 0.1) < work - 0.05


def test_a_cycle_without_checkpoints_only_works() -> None:
    cycle = Cycle(float("inf"), 1, 0.0, 5.0, 0.0)
    assert (cycle.work_at(1e6), cycle.stored_at(1e6), cycle.elapsed_for(1e6)) == (1e6, 0.0, 1e6)
