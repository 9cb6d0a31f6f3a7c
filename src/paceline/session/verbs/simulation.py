"""What `paceline simulate` finds out: policies under the same failures, and the best interval between checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.plan.planned import Planned, plan_task
from paceline.simulate.defaults import COMPARED, costs_of, make_policy, saving_for, scenario_of
from paceline.simulate.engine import simulate_run
from paceline.simulate.outcome import RunOutcome
from paceline.simulate.policy import Policy, split_policy
from paceline.simulate.scenario import Scenario
from paceline.simulate.sweep import IntervalSweep, PolicyResult, simulate_policy, sweep_intervals
from paceline.spec.load import Spec

SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True)
class Simulation:
    """A planned task on machines that fail: what each policy makes of the same failures.

    `sweep` is the first policy over intervals between checkpoints, where it was asked for.
    """

    planned: Planned
    scenario: Scenario
    results: tuple[PolicyResult, ...]
    sweep: IntervalSweep | None
    runs: int  # of each policy
    seed: int  # of the failures

    def first_run(self) -> RunOutcome:
        """Return the first run of the first policy with everything that happened in it, for a trace."""
        return simulate_run(self.scenario, self.results[0].policy, self.seed, record=True)


def simulation(
    spec: Spec,
    *,
    days: float | None = None,
    policies: Sequence[str] = (),
    runs: int = 50,
    seed: int = 0,
    intervals: bool = False,
    say: Callable[[str], None] | None = None,
) -> Simulation:
    """Return `runs` runs of every policy; without `days`, each until the task is done.

    Raises ConfigError for what is no policy, and where nothing is known of how often the machines fail.
    """
    planned = plan_task(spec, say=say)
    scenario = scenario_of(planned, math.inf if days is None else days * SECONDS_PER_DAY)
    chosen, costs = _policies(planned, scenario, policies), costs_of(planned)
    results = tuple(simulate_policy(scenario, policy, runs, seed, costs) for policy in chosen)
    sweep = sweep_intervals(scenario, chosen[0], runs, seed) if intervals else None
    return Simulation(planned, scenario, results, sweep, runs, seed)


def _policies(planned: Planned, scenario: Scenario, asked: Sequence[str]) -> list[Policy]:
    """Return the policies asked for, or those that are compared where none is."""
    reliability, step = planned.spec.cluster.reliability, planned.forecast.step_seconds.value
    saving = saving_for(planned)
    pairs = [split_policy(text) for text in asked] or [(name, {}) for name in COMPARED]
    return [make_policy(name, scenario, saving, reliability, step, settings) for name, settings in pairs]
