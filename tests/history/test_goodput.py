"""Goodput: kinds of time that add up, and a simulation that is held against runs that failed at random."""

from __future__ import annotations

import random
from statistics import mean
from typing import Any

import pytest

from paceline.history.goodput import MeasuredGoodput, goodput_text
from paceline.report.summary import Summary, summarise

Line = dict[str, Any]
STEP, STALL, WRITE, BACK, EVERY = 1.0, 0.1, 0.4, 3.0, 20


def stormy(faults_every: float, steps: int, seed: int) -> list[Line]:
    """Return the journal of a run whose ranks die at random and which goes on in its processes, second by second."""
    drawn, now, step, attempt = random.Random(seed), 0.0, 0, 1
    lines: list[Line] = [{"kind": "run_started", "time": now, "attempt": attempt, "step": 0, "position": 0}]
    saved, strike = [(0.0, 0)], drawn.expovariate(1 / faults_every)  # (when it is safe, its step)
    while step < steps:
        if now + STEP > strike:
            now = strike + BACK
            strike = now + drawn.expovariate(1 / faults_every)
            safe = max(at for when, at in saved if when <= now - BACK)
            lines.append({"kind": "recovery", "time": now, "attempt": attempt, "generation": 2, "rung": "reform",
                          "step": safe, "steps_lost": step - safe, "seconds": {"total": BACK}})  # fmt: skip
            step = safe
            continue
        now, step = now + STEP, step + 1
        lines.append({"kind": "step", "time": now, "attempt": attempt, "step": step, "loss": 1.0, "weight": 1.0,
                      "seconds": {"total": STEP, "data": 0.0, "forward_backward": STEP}})  # fmt: skip
        if step % EVERY == 0:
            now += STALL
            saved.append((now + WRITE - STALL, step))
            lines.append({"kind": "checkpoint", "time": now, "attempt": attempt, "step": step, "path": "x", "bytes": 1,
                          "seconds": WRITE, "stall_seconds": STALL})  # fmt: skip
    return [*lines, {"kind": "run_ended", "time": now, "attempt": attempt, "status": "complete", "exit_code": 0}]


def of(lines: list[Line]) -> Summary:
    return summarise(lines)


def added_up(found: MeasuredGoodput) -> float:
    return sum((found.useful_seconds, found.lost_seconds, found.recovery_seconds, found.stall_seconds,
                found.between_seconds, found.other_seconds))  # fmt: skip


def test_the_kinds_add_up_and_are_those_of_the_storm() -> None:
    lines = stormy(faults_every=60.0, steps=400, seed=3)
    found, recoveries = of(lines).goodput, [line for line in lines if line["kind"] == "recovery"]
    assert found.useful_seconds == pytest.approx(400 * STEP)
    assert found.lost_seconds == pytest.approx(sum(line["steps_lost"] for line in recoveries) * STEP)
    assert found.recovery_seconds == pytest.approx(BACK * len(recoveries)) and found.faults == len(recoveries) > 2
    assert added_up(found) == pytest.approx(found.wall_seconds) and found.between_seconds == 0.0
    assert found.other_seconds < STEP * (1 + len(recoveries)), "of a step that a fault cut short, and no more"
    assert "for which the simulator expects" in goodput_text(found)


def test_the_simulator_expects_what_happens() -> None:
    """Over many storms the mean goodput is the simulator's within what is left of chance, and most are in its range."""
    for faults_every in (100.0, 400.0):
        runs = [of(stormy(faults_every, 600, seed)).goodput for seed in range(40)]
        kept = [(run, run.simulated.goodput) for run in runs if run.simulated is not None]
        measured = [run.useful_seconds / run.exposed_seconds for run, _ in kept]
        assert mean(measured) == pytest.approx(mean([found.mean for _, found in kept]), abs=0.02), faults_every
        inside = [found.p10 <= share <= found.p90 for share, (_, found) in zip(measured, kept, strict=True)]
        assert mean(inside) > 0.6, "of 80 %, since each run's own rate of faults is taken for the true one"


def test_costs_are_those_of_the_storm() -> None:
    costs = of(stormy(faults_every=60.0, steps=400, seed=3)).goodput.costs
    assert costs is not None and costs.kept == 0.0 and costs.devices == 1
    assert (costs.step, costs.every) == (pytest.approx(STEP), pytest.approx(EVERY * STEP))
    assert (costs.stall, costs.write) == (pytest.approx(STALL), pytest.approx(WRITE))
    assert costs.detection + costs.restart + costs.restore == pytest.approx(BACK)
    assert costs.policy.write == pytest.approx(WRITE - STALL)
    assert costs.scenario.mtbf_seconds == pytest.approx(costs.between_faults)


def test_a_run_without_a_fault_expects_nothing() -> None:
    found = of(stormy(1e9, 50, 0)).goodput
    assert found.simulated is None and found.costs is None and found.faults == 0 and found.lost_seconds == 0
    assert found.share == pytest.approx(50 * STEP / (50 * STEP + 2 * STALL))
    assert of([]).goodput.share == 1.0


def test_a_run_that_saved_nothing_and_lost_nothing_is_expected_to_lose_nothing() -> None:
    """Its ranks went on from memory each time, a step before the fault at most; no checkpoint was due."""
    lines = [line for line in stormy(60.0, 400, 3) if line["kind"] != "checkpoint"]
    made: set[int] = set()
    kept = []  # the same storm, but that no step is made twice
    for line in lines:
        if line["kind"] == "recovery":
            line |= {"step": max(made), "steps_lost": 0}
        elif line["kind"] == "step":
            if line["step"] in made:
                continue
            made.add(line["step"])
        kept.append(line)
    found = of(kept).goodput
    assert found.costs is not None and found.simulated is not None
    assert found.costs.kept == 1.0 and found.costs.every == pytest.approx(400 * STEP)
    assert found.simulated.goodput.mean > 0.9, "3 s of every 60 s, and half a step"


def restarted(faults_every: float, steps: int, seed: int, down: float = 4.0, load: float = 2.0) -> list[Line]:
    """Return the journal of a run that dies at random and that a launcher starts again, from the newest checkpoint."""
    drawn, now, step, attempt, safe = random.Random(seed), 0.0, 0, 1, 0
    lines: list[Line] = [{"kind": "run_started", "time": now, "attempt": attempt, "step": 0, "position": 0}]
    strike = drawn.expovariate(1 / faults_every)
    while step < steps:
        if now + STEP > strike:
            now, attempt, step = now + down, attempt + 1, safe
            lines.append({"kind": "run_started", "time": now, "attempt": attempt, "step": safe, "position": safe})
            now += load
            strike = now + drawn.expovariate(1 / faults_every)
            continue
        now, step = now + STEP, step + 1
        lines.append({"kind": "step", "time": now, "attempt": attempt, "step": step, "loss": 1.0, "weight": 1.0,
                      "seconds": {"total": STEP, "data": 0.0, "forward_backward": STEP}})  # fmt: skip
        if step % EVERY == 0:
            now, safe = now + STALL, step
            lines.append({"kind": "checkpoint", "time": now, "attempt": attempt, "step": step, "path": "x", "bytes": 1,
                          "seconds": STALL, "stall_seconds": STALL})  # fmt: skip
    return [*lines, {"kind": "run_ended", "time": now, "attempt": attempt, "status": "complete", "exit_code": 0}]


def test_a_run_that_a_launcher_starts_again_has_its_simulated_goodput_too() -> None:
    lines = restarted(60.0, 400, 3)
    found, again = of(lines).goodput, sum(line["kind"] == "run_started" for line in lines) - 1
    assert (found.faults, found.restarts) == (0, again) and again > 2
    # One died as it loaded: until when it did is not on record.
    assert found.recovery_seconds == pytest.approx(2.0 * (again - 1)) and found.other_seconds == pytest.approx(0.0)
    assert found.between_seconds == pytest.approx(4.0 * again + 2.0), "until the launcher starts it nobody runs"
    assert added_up(found) == pytest.approx(found.wall_seconds)
    assert found.costs is not None and found.costs.detection == 0.0
    assert found.costs.restart == pytest.approx(found.recovery_seconds / again)
    assert f"; {again} new starts, for which the simulator expects" in goodput_text(found)
    runs = [of(restarted(100.0, 600, seed)).goodput for seed in range(40)]
    kept = [(run, run.simulated.goodput) for run in runs if run.simulated is not None]
    measured = [run.useful_seconds / run.exposed_seconds for run, _ in kept]
    assert mean(measured) == pytest.approx(mean([found.mean for _, found in kept]), abs=0.02)


def test_a_night_in_which_nobody_starts_a_killed_run_again_is_no_cost_of_the_run() -> None:
    """Eight hours of it were "recovery", and what the simulator took each fault to cost."""
    short, long = (of(restarted(60.0, 400, 3, down=down)).goodput for down in (4.0, 28_800.0))
    assert long.recovery_seconds == pytest.approx(short.recovery_seconds)
    assert long.costs is not None and short.costs is not None and long.simulated and short.simulated
    assert vars(long.costs) == pytest.approx(vars(short.costs))
    assert long.between_seconds == pytest.approx(28_800.0 * long.restarts, rel=1e-4)
    assert long.exposed_seconds == pytest.approx(short.exposed_seconds)
    assert long.simulated.goodput.mean == pytest.approx(short.simulated.goodput.mean)
    assert "between starts 3d 08h" in goodput_text(long) and "recovery 18 s" in goodput_text(long)


def test_ends_that_were_asked_for_and_starts_of_a_call_are_no_new_starts() -> None:
    lines = restarted(60.0, 400, 3)
    second = next(at for at, line in enumerate(lines) if line.get("attempt") == 2)
    asked = {"kind": "run_ended", "time": lines[second - 1]["time"], "attempt": 1, "status": "stopped", "exit_code": 0}
    before = of(lines).goodput
    assert of([*lines[:second], asked, *lines[second:]]).goodput.restarts == before.restarts - 1
    at = lines[second]["step"]
    recovery = {"kind": "recovery", "time": lines[second + 1]["time"], "attempt": 2, "generation": 2, "step": at,
                "rung": "restart", "seconds": {"total": 7.0, "step": STEP}}  # fmt: skip
    found = of([*lines[: second + 1], recovery, *lines[second + 1 :]]).goodput
    assert (found.faults, found.restarts) == (1, before.restarts - 1)
    assert found.recovery_seconds == pytest.approx(before.recovery_seconds + 4.0), "its own supervisor was at work"
    assert found.between_seconds == pytest.approx(before.between_seconds - 4.0)
