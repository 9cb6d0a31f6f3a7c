"""What `paceline simulate` finds out: policies under the same failures, and the best interval between checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.history.goodput import MeasuredGoodput
from paceline.plan.planned import Planned, plan_task
from paceline.plan.risk.failing_machines import costs_of, saving_for, scenario_of
from paceline.session.verbs.run_folder import open_run
from paceline.simulate.costs_of_run import MeasuredCosts, Rehearsal, rehearse
from paceline.simulate.defaults import COMPARED, make_policy
from paceline.simulate.engine import simulate_run
from paceline.simulate.outcome import RunOutcome
from paceline.simulate.policy import Policy, split_policy
from paceline.simulate.scenario import Scenario
from paceline.simulate.sweep import IntervalSweep, PolicyResult, simulate_policy, sweep_intervals
from paceline.spec.load import Spec

SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True)
class SideBySide:
    """A run that went on after faults, simulated from its own costs, beside what it took.

    Both leave out what `measured.other_seconds` holds, starting and proving but for starts that follow a fault, and
    what `measured.between_seconds` holds, in which nobody ran.
    """

    run_dir: Path
    measured: MeasuredGoodput
    costs: MeasuredCosts
    simulated: Rehearsal


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
    held: SideBySide | None = None  # the run whose costs were taken, beside what a simulation of it says

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
    measured: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Simulation:
    """Return `runs` runs of every policy; without `days`, each until the task is done.

    `measured` is a run that went on after faults: its failure rate is taken, and its costs are the first policy. Raises
    ConfigError for what is no policy, and where nothing is known of how often the machines fail.
    """
    held = None if measured is None else hold_against(measured, runs, seed)
    planned = plan_task(spec, say=say)
    rates = held.costs.scenario.rates if held else None
    scenario = scenario_of(planned, math.inf if days is None else days * SECONDS_PER_DAY, rates)
    chosen, costs = _policies(planned, scenario, policies, held is None), costs_of(planned)
    chosen = [held.costs.policy, *chosen] if held else chosen
    results = tuple(simulate_policy(scenario, policy, runs, seed, costs) for policy in chosen)
    sweep = sweep_intervals(scenario, chosen[0], runs, seed) if intervals else None
    return Simulation(planned, scenario, results, sweep, runs, seed, held)


def hold_against(run_dir: Path, runs: int = 50, seed: int = 0) -> SideBySide:
    """Return a run simulated from its own costs. Raises ConfigError where it has gone on after no fault."""
    measured = open_run(run_dir).summary().goodput
    if measured.costs is None:
        raise ConfigError(
            f"the run in '{run_dir}' tells no costs of faults", "it has gone on after none",
            "rehearse some: paceline train SPEC --faults faults.toml",
        )  # fmt: skip
    return SideBySide(run_dir, measured, measured.costs, rehearse(measured.costs, runs, seed))


def _policies(planned: Planned, scenario: Scenario, asked: Sequence[str], compares: bool) -> list[Policy]:
    """Return the policies asked for, or where none is, those that are compared by default."""
    reliability, step = planned.spec.cluster.reliability, planned.forecast.step_seconds.value
    saving = saving_for(planned)
    pairs = [split_policy(text) for text in asked] or [(name, {}) for name in (COMPARED if compares else ())]
    return [make_policy(name, scenario, saving, reliability, step, settings) for name, settings in pairs]
