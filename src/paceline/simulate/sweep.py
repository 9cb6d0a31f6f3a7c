"""Sweep: simulate policies side by side, and one policy over intervals between checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.simulate.defaults import with_every
from paceline.simulate.engine import simulate_run
from paceline.simulate.interval import daly_interval, expected_time, young_interval
from paceline.simulate.outcome import NodeCosts, PolicySummary, RunOutcome, summarise
from paceline.simulate.policy import Policy
from paceline.simulate.scenario import Scenario

SWEEP_FACTORS = (1 / 8, 1 / 5, 1 / 3, 1 / 2, 2 / 3, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)


@dataclass(frozen=True)
class PolicyResult:
    """A policy and what its simulated runs say together."""

    policy: Policy
    summary: PolicySummary


@dataclass(frozen=True)
class IntervalPoint:
    """One interval of a sweep: the simulated mean and its standard error, and the formula's expectation."""

    every: float
    goodput: float
    standard_error: float
    expected_goodput: float


@dataclass(frozen=True)
class IntervalSweep:
    """Goodput over intervals between checkpoints, and three answers to which is best."""

    points: tuple[IntervalPoint, ...]
    young: float
    daly: float
    simulated: float


def simulate_policy(scenario: Scenario, policy: Policy, runs: int, seed: int, costs: NodeCosts) -> PolicyResult:
    """Return the summary of `runs` runs of a policy. Policies with the same seed meet the same failures."""
    return PolicyResult(policy, summarise(_outcomes(scenario, policy, runs, seed), costs))


def sweep_intervals(scenario: Scenario, policy: Policy, runs: int, seed: int) -> IntervalSweep:
    """Return goodput at intervals around Daly's, under the same failures at every interval.

    The simulated best is the interval with the highest mean; its neighbours bound how well it is known.
    """
    mtbf = scenario.mtbf_seconds
    daly = daly_interval(policy.stall, mtbf)
    shortest = max(policy.write - policy.stall, 1e-3)
    intervals = sorted({max(shortest, daly * factor) for factor in SWEEP_FACTORS}) if math.isfinite(daly) else []
    points = tuple(_point(scenario, with_every(policy, every), runs, seed) for every in intervals)
    best = max(points, key=lambda point: point.goodput).every if points else math.inf
    return IntervalSweep(points, young_interval(policy.stall, mtbf), daly, best)


def _point(scenario: Scenario, policy: Policy, runs: int, seed: int) -> IntervalPoint:
    summary = summarise(_outcomes(scenario, policy, runs, seed), NodeCosts())
    return IntervalPoint(
        policy.every,
        summary.goodput.mean,
        summary.goodput.deviation / math.sqrt(runs),
        expected_goodput(scenario, policy),
    )


def expected_goodput(scenario: Scenario, policy: Policy) -> float:
    """Return the goodput that Daly's formula gives: checkpoints only, a node always at hand, failures alone."""
    time = expected_time(
        scenario.work_seconds, policy.every, policy.stall, scenario.mtbf_seconds, policy.recovery, policy.write
    )
    return scenario.work_seconds / time.mean


def _outcomes(scenario: Scenario, policy: Policy, runs: int, seed: int) -> Sequence[RunOutcome]:
    return [simulate_run(scenario, policy, seed, index) for index in range(runs)]
