"""Expected: what a planned run takes when machines fail, in closed form; `simulate` tells more, and takes longer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.plan.choice import Choice
from paceline.simulate.defaults import make_policy, rates_of, saving_for, scenario_of
from paceline.simulate.interval import expected_time
from paceline.simulate.policy import duration_text
from paceline.spec.forecast import Z80, Estimate, Term


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


def expected_run(planned: Choice) -> Expected:
    """Return the run's time under the cluster's failures, with asynchronous checkpoints and spare nodes at hand.

    The interval joins the forecast's own with the spread of failures. Choice interruptions, slow devices and spot
    preemption are left to `simulate`.
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
    every, recovery = duration_text(policy.every), duration_text(policy.recovery)
    saving = f"every {every} of work (Daly 2006), {policy.stall:.3g} s each"
    coming = f"{failures:,.3g} failures x {recovery}: detection, restart, restore"
    undone = "what failures undo: the rest of Daly's expected time (2006, equation 20)"
    terms = (
        Term("training", run.value, "steps x time per step, without any interruption", run.source),
        Term("checkpoints", stalled, saving, "assumed"),
        Term("coming back", back, coming, "assumed"),
        Term("lost work", lost, undone, rates.source),
    )
    wall = _estimate(time.mean, math.sqrt(time.variance), run)
    return Expected(wall, run.value / time.mean, failures, terms, rates.text)


def _estimate(mean: float, deviation: float, run: Estimate) -> Estimate:
    ratio = 1 + math.hypot(run.high / run.value - 1, Z80 * deviation / mean)
    return Estimate(mean, mean / ratio, mean * ratio, "assumed")
