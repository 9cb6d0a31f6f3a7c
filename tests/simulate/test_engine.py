"""Runs event by event: exact where nothing happens, against a second implementation, and in what must be monotone."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_examples import DAY, HOUR, policy, rates, scenario

from paceline.simulate.defaults import enough_spares
from paceline.simulate.engine import simulate_run
from paceline.simulate.events import (
    LOST,
    PREEMPTION,
    PRODUCTIVE,
    SAVING,
    SHRUNK,
    SLOWED,
    WAITING,
    Strikes,
)
from paceline.simulate.outcome import NodeCosts, summarise
from paceline.simulate.policy import Policy
from paceline.simulate.scenario import Scenario


def test_without_failures_a_run_takes_its_work_and_its_checkpoints() -> None:
    outcome = simulate_run(scenario(math.inf, work_hours=10.5), policy())
    assert outcome.wall_seconds == pytest.approx(10.5 * HOUR + 10 * 300.0)
    assert outcome.seconds[SAVING] == pytest.approx(10 * 300.0)
    assert (outcome.failures, outcome.finished) == (0, True)
    assert outcome.goodput == pytest.approx(10.5 / (10.5 + 10 / 12))


def test_nothing_is_saved_after_the_last_interval() -> None:
    assert simulate_run(scenario(math.inf, work_hours=3.0), policy()).seconds[SAVING] == pytest.approx(2 * 300.0)


def by_hand(job: Scenario, saves: Policy, seed: str) -> tuple[float, float]:
    """Return wall time and lost work of a job whose failures evict nobody, walking from checkpoint to checkpoint."""
    strikes = Strikes(job.causes, job.devices, f"{seed}/strikes")
    upcoming = strikes.next()
    now = done = lost = 0.0
    while True:
        reached, written = done, done  # since this start: work in hand, and safe in storage
        while True:
            block = min(saves.every, job.work_seconds - reached)
            assert upcoming is not None
            if now + block > upcoming.at:
                worked = upcoming.at - now
                break
            now, reached = now + block, reached + block
            if reached >= job.work_seconds - 1e-9:
                return now, lost
            worked = 0.0
            if now + saves.stall > upcoming.at:
                break
            now, written = now + saves.stall, reached
        lost += reached + worked - written
        done = written
        while upcoming.at <= now or upcoming.at < upcoming.at + saves.recovery:
            now = upcoming.at
            upcoming = strikes.next()
            assert upcoming is not None
            if upcoming.at >= now + saves.recovery:
                now += saves.recovery
                break


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.3, 30.0), st.floats(0.05, 4.0), st.floats(0.0, 600.0))
def test_a_walk_from_checkpoint_to_checkpoint_finds_the_same(
    seed: int, mtbf_hours: float, every_hours: float, stall: float
) -> None:
    job, saves = scenario(mtbf_hours, work_hours=20.0), policy(every=every_hours * HOUR, stall=stall)
    outcome = simulate_run(job, saves, seed)
    if not outcome.finished:
        return  # a hopeless one, given up; the walk would go on
    wall, lost = by_hand(job, saves, f"{seed}/0")
    assert outcome.wall_seconds == pytest.approx(wall, rel=1e-9)
    assert outcome.seconds[LOST] == pytest.approx(lost, rel=1e-9, abs=1e-6)


BUSY = replace(
    scenario(),
    nodes=16, devices_per_node=4, work_seconds=4 * DAY, rates=rates(2000.0, evicts=True), replicas=8, micro_batches=32,
    repair_seconds=DAY / 2, preemption_hours_per_node=2000.0, slow_hours_per_device=5000.0,
)  # fmt: skip
POLICIES = {
    "replace": policy(spares=2, every=600.0, stall=5.0, write=60.0),
    "shrink": policy(on_loss="shrink", every=600.0, stall=5.0, write=60.0),
    "memory": policy(
        spares=2, every=1800.0, stall=5.0, write=60.0, memory_every=120.0, memory_stall=1.0, memory_restore=5.0,
        memory_survives=0.9,
    ),
    "long notice": policy(spares=1, every=600.0, stall=30.0, write=600.0),
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(POLICIES)))
def test_every_second_is_accounted_for(seed: int, name: str) -> None:
    for horizon in (math.inf, 2 * DAY):
        outcome = simulate_run(replace(BUSY, horizon_seconds=horizon), POLICIES[name], seed, record=True)
        assert sum(outcome.seconds.values()) == pytest.approx(outcome.wall_seconds, rel=1e-9)
        assert min(outcome.seconds.values()) >= -1e-6
        assert outcome.wall_seconds <= horizon
        if outcome.finished:
            assert outcome.seconds[PRODUCTIVE] == pytest.approx(BUSY.work_seconds, rel=1e-9)
        assert sum(span.end - span.begin for span in outcome.spans) == pytest.approx(outcome.wall_seconds, rel=1e-9)
        assert outcome.busy_node_seconds <= outcome.held_node_seconds + 1e-6


def test_a_seed_gives_one_run_and_another_seed_another() -> None:
    first, again = (simulate_run(BUSY, POLICIES["replace"], 7, 3, record=True) for _ in range(2))
    assert first == again
    assert simulate_run(BUSY, POLICIES["replace"], 8, 3).wall_seconds != first.wall_seconds
    assert simulate_run(BUSY, POLICIES["replace"], 7, 4).wall_seconds != first.wall_seconds


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from(["detection", "restart", "restore", "stall"]), st.floats(1.0, 3000.0)
)  # fmt: skip
def test_what_takes_longer_never_ends_a_run_earlier(seed: int, field: str, more: float) -> None:
    """Under the same failures; it holds run by run, not only in the mean."""
    job, saves = scenario(5.0, work_hours=30.0), policy(every=900.0, stall=10.0)
    slower = replace(saves, **{field: getattr(saves, field) + more})
    assert simulate_run(job, slower, seed).wall_seconds >= simulate_run(job, saves, seed).wall_seconds - 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 4))
def test_another_spare_never_makes_a_run_wait_longer(seed: int, spares: int) -> None:
    job = replace(BUSY, preemption_hours_per_node=None, slow_hours_per_device=None)
    few = simulate_run(job, policy(spares=spares, every=600.0, stall=5.0), seed)
    more = simulate_run(job, policy(spares=spares + 1, every=600.0, stall=5.0), seed)
    assert more.wall_seconds <= few.wall_seconds + 1e-6


def test_more_failures_cost_more_in_the_mean() -> None:
    walls = [
        statistics.fmean(simulate_run(scenario(hours), policy(), 1, index).wall_seconds for index in range(40))
        for hours in (2.0, 4.0, 8.0, 1e9)
    ]
    assert walls == sorted(walls, reverse=True)


def test_planned_stops_lose_no_work() -> None:
    job = replace(scenario(), rates=rates(5.0, planned=True))
    outcome = simulate_run(job, policy(), seed=3)
    assert outcome.planned_stops > 5
    assert (outcome.failures, outcome.seconds[LOST]) == (0, 0.0)


def test_preemption_with_notice_enough_to_save_loses_no_work() -> None:
    spot = replace(scenario(math.inf), preemption_hours_per_node=5.0, preemption_notice=400.0, preemption_return=60.0)
    saved = simulate_run(spot, policy(), seed=3)
    assert saved.interruptions[PREEMPTION] > 5
    assert saved.seconds[LOST] == 0.0
    assert simulate_run(replace(spot, preemption_notice=299.0), policy(), seed=3).seconds[LOST] > 0.0


def test_a_slow_device_slows_the_job_until_it_is_found() -> None:
    slow = replace(
        scenario(math.inf, work_hours=100.0), slow_hours_per_device=20.0, slow_factor=2.0, slow_detection=HOUR,
        repair_seconds=1.0,
    )  # fmt: skip
    outcome = simulate_run(slow, policy(every=math.inf, stall=0.0), seed=1)
    # Every slow hour does half an hour's work: what is slowed is half of the slow time, an hour for each that is found.
    assert outcome.planned_stops > 2
    assert 0 < outcome.seconds[SLOWED] <= (outcome.planned_stops + 1) * HOUR / 2 + 1e-6


def test_a_smaller_job_takes_whole_turns() -> None:
    job = replace(scenario(), nodes=8, replicas=8, micro_batches=32)
    assert [job.speed(replicas) for replicas in (8, 7, 4, 1, 0)] == [1.0, 4 / 5, 4 / 8, 4 / 32, 0.0]
    assert [job.replicas_on(nodes) for nodes in (8, 7, 1, 0)] == [8, 7, 1, 0]
    wide = replace(job, nodes=16, replicas=4)  # a copy of the model on four nodes: losing one loses four
    assert [wide.replicas_on(nodes) for nodes in (16, 15, 12, 11)] == [4, 3, 3, 2]


def test_shrinking_goes_on_where_replacing_waits() -> None:
    job = replace(BUSY, preemption_hours_per_node=None, slow_hours_per_device=None, repair_seconds=2 * DAY)
    waits = simulate_run(job, policy(every=600.0, stall=5.0), 1)
    shrinks = simulate_run(job, policy(every=600.0, stall=5.0, on_loss="shrink"), 1)
    assert waits.seconds[WAITING] > 0 == waits.seconds[SHRUNK]
    assert shrinks.seconds[SHRUNK] > 0 == shrinks.seconds[WAITING]


def test_the_spares_that_are_enough_leave_a_node_missing_one_time_in_a_hundred() -> None:
    """Palm's theorem: nodes in repair are Poisson distributed, so waiting takes 1 % of the time at most."""
    job = Scenario(1000, 8, 60 * DAY, rates(40000.0, evicts=True), repair_seconds=DAY)
    spares = enough_spares(job)
    mean = job.evictions_per_second * job.repair_seconds
    assert mean == pytest.approx(8000 * 24 / 40000)
    covered = [sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(n + 1)) for n in (spares - 1, spares)]
    assert covered[0] < 0.99 <= covered[1]
    outcomes = [simulate_run(job, policy(every=600.0, stall=1.0, spares=spares), 1, index) for index in range(10)]
    assert statistics.fmean(outcome.seconds[WAITING] / outcome.wall_seconds for outcome in outcomes) < 0.015


def test_copies_in_memory_lose_less_and_what_they_lose_is_a_few_copies() -> None:
    job, plain = scenario(4.0, work_hours=400.0), policy(every=2 * HOUR, stall=0.0)
    copies = replace(plain, memory_every=120.0, memory_survives=1.0, memory_restore=60.0)
    without, with_copies = simulate_run(job, plain, 1), simulate_run(job, copies, 1)
    assert with_copies.seconds[LOST] / with_copies.failures == pytest.approx(60.0, rel=0.2)
    assert without.seconds[LOST] / without.failures > 1000.0
    none = replace(copies, memory_survives=0.0)
    assert simulate_run(job, none, 1).seconds[LOST] == pytest.approx(without.seconds[LOST])


def test_spares_are_paid_for_and_draw_less_than_nodes_that_compute() -> None:
    job = scenario(math.inf, work_hours=10.0)
    outcome = simulate_run(job, policy(every=math.inf, spares=2))
    summary = summarise([outcome], NodeCosts(usd_per_hour=2.0, computing_watts=1000.0, waiting_watts=100.0))
    assert summary.usd.mean == pytest.approx(10 * 3 * 2.0)
    assert summary.kwh.mean == pytest.approx(10 * (1.0 + 2 * 0.1))
    assert math.isnan(summarise([outcome], NodeCosts()).kwh.mean)


def test_a_hopeless_run_is_given_up() -> None:
    outcome = simulate_run(scenario(0.1, work_hours=10.0), policy())
    assert not outcome.finished
    assert outcome.wall_seconds == pytest.approx(100 * HOUR)
