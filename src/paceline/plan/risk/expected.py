"""Expected: what a planned run takes when machines fail, in closed form; `simulate` tells more, and takes longer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.plan.choice import Choice
from paceline.plan.risk.failing_machines import saving_for, scenario_of
from paceline.simulate.defaults import make_policy
from paceline.simulate.failures import rates_of
from paceline.simulate.interval import expected_time
from paceline.simulate.policy import Policy, duration_text
from paceline.simulate.scenario import Scenario
from paceline.spec.forecast import Z80, Estimate, Term

RARE = 1e-9  # chances below which nodes are not counted
MANY = 500.0  # nodes away on average, from which on their spread does not matter


@dataclass(frozen=True)
class Expected:
    """A run under failures: its wall time with an 80 % interval, where the time goes, and the goodput.

    `terms` are seconds of the run and add up to `wall_seconds`. Values are NaN where nothing is known of failures;
    `because` then says so.
    """

    wall_seconds: Estimate
    goodput: float
    interruptions: float
    terms: tuple[Term, ...]
    because: str
    usd: float = math.nan  # at the same price as the forecast's; NaN where that is unknown


def expected_run(planned: Choice) -> Expected:
    """Return the run's time under the cluster's failures, with asynchronous checkpoints and spare nodes at hand.

    The interval joins the forecast's own with the spread of failures. Interruptions by choice and slow devices are left
    to `simulate`.
    """
    reliability, run = planned.spec.cluster.reliability, planned.forecast.run_seconds
    rates = rates_of(planned.cluster.device.name, reliability)
    if rates.source == "unknown" or not math.isfinite(run.value):
        because = rates.text if rates.source == "unknown" else "the time of a step is unknown"
        return Expected(Estimate(math.nan, math.nan, math.nan, "unknown"), math.nan, math.nan, (), because)
    scenario, step = scenario_of(planned), planned.forecast.step_seconds.value
    policy = make_policy("spares", scenario, saving_for(planned), reliability, step)
    mtbf = scenario.mtbf_seconds
    time = expected_time(run.value, policy.every, policy.stall, mtbf, policy.recovery, policy.write)
    failures = time.mean / mtbf if math.isfinite(mtbf) else 0.0
    saves = max(0.0, run.value / policy.every - 1) if math.isfinite(policy.every) else 0.0
    stalled, back = saves * policy.stall, failures * policy.recovery
    lost = max(0.0, time.mean - run.value - stalled - back)
    taken, wall = _preemptions(scenario, policy, time.mean), time.mean
    if taken is not None:
        wall, failures = time.mean + taken.term.value, failures + taken.count
    every, recovery = duration_text(policy.every), duration_text(policy.recovery)
    saving = f"every {every} of work (Daly 2006), {policy.stall:.3g} s each"
    coming = (
        f"{time.mean / mtbf if math.isfinite(mtbf) else 0.0:,.3g} failures x {recovery}: detection, restart, restore"
    )
    undone = "what failures undo: the rest of Daly's expected time (2006, equation 20)"
    terms = (
        Term("training", run.value, "steps x time per step, without any interruption", run.source),
        Term("checkpoints", stalled, saving, "assumed"),
        Term("coming back", back, coming, "assumed"),
        Term("lost work", lost, undone, rates.source),
        *([taken.term] if taken else []),
    )
    found = _estimate(wall, math.sqrt(time.variance), run)
    usd = planned.forecast.usd.value * wall / run.value
    return Expected(found, run.value / wall, failures, terms, rates.text, usd)


@dataclass(frozen=True)
class Preemptions:
    """How many nodes are taken away in a run, and what that costs of its time."""

    count: float
    term: Term


def _preemptions(scenario: Scenario, policy: Policy, seconds: float) -> Preemptions | None:
    """Return what preemption adds to a run of so many seconds; None where no node is taken away.

    Each stops the job for a restart and a restore, without the time to notice it; with enough notice for a save nothing
    is lost, else half an interval is. A node that is taken is replaced by a spare one where one is left, else waited
    for: nodes that are away are Poisson distributed (Palm's theorem). It goes on while the job is longer for it.
    """
    hours = scenario.preemption_hours_per_node
    if hours is None:
        return None
    rate = scenario.nodes / (hours * 3600)
    away = scenario.evictions_per_second * scenario.repair_seconds + rate * scenario.preemption_return
    waits = _returns_waited(away, policy.spares) * scenario.preemption_return
    announced = policy.stall + policy.write <= scenario.preemption_notice
    lost = 0.0 if announced else min(policy.every, seconds) / 2
    each = policy.restart + policy.restore + lost + waits
    share = rate * each
    whole = seconds / (1 - share) if share < 1 else math.inf
    text = (
        f"{rate * whole:,.3g} times x {duration_text(each)}: restart and restore"
        f"{'' if announced else ', half an interval'}{f', {duration_text(waits)} for a node' if waits >= 1 else ''};"
        f" a node is taken every {hours:g} h"
    )
    return Preemptions(rate * whole, Term("preemption", whole - seconds, text, "assumed"))


def _returns_waited(away: float, spares: int) -> float:
    """Return how many mean times of return a job waits for a node, where so many are away on average.

    With n nodes away already and s spare ones, n + 1 - s must come back, the first of n + 1, then of n, and so on.
    """
    if away > MANY:  # as many as on average, whose harmonic sum is a logarithm
        return max(0.0, math.log((away + 1) / (spares + 1)))
    chance, waited, number = math.exp(-away), 0.0, 0
    while number <= max(spares, away) or chance > RARE:
        if number >= spares:
            waited += chance * math.fsum(1 / left for left in range(spares + 1, number + 2))
        number += 1
        chance *= away / number
    return waited


def _estimate(mean: float, deviation: float, run: Estimate) -> Estimate:
    ends = (run.value / run.low, run.high / run.value)
    down, up = (1 + math.hypot(sure - 1, Z80 * deviation / mean) for sure in ends)
    return Estimate(mean, mean / down, mean * up, "assumed")
