"""A run's budget before it starts: refused where it is used up, not known, or less than the forecast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from paceline.errors import ConfigError, DoesNotFit, PacelineError
from paceline.plan.planned import Planned, plan_task
from paceline.run.survive.budget import spent_in
from paceline.spec.arguments import run_directory
from paceline.spec.journal.held import held_in
from paceline.spec.journal.reading import read_tail_step
from paceline.spec.plan import GoalSpec
from paceline.spec.survive.budget import BUDGETS, BudgetSpec

Say = Callable[[str], None]

# What to state where a forecast cannot be made, and the goal whose plans need the least of it.
UNKNOWN = {
    "usd": "cluster.price_usd_per_device_hour",
    "kwh": "cluster.watts_per_device",
    "kg_co2e": "cluster.region, or cluster.carbon_g_per_kwh",
}
GOALS = {"usd": "money", "kwh": "energy", "kg_co2e": "carbon", "device_hours": "money"}


def check_budget(planned: Planned, say: Say) -> None:
    """Say what the run's budget leaves; return where there is none.

    Raises ConfigError where it is used up or counts what is not known, and DoesNotFit where the forecast of the steps
    that are left is beyond it and the spec does not say to train all the same.
    """
    budget = planned.spec.run.budget
    if not budget.limits:
        return
    run_dir = run_directory(planned.spec)
    spent, done = spent_in(held_in(run_dir)), min(read_tail_step(run_dir), planned.steps)
    for name, limit in budget.limits.items():
        amount, unit, said = BUDGETS[name]
        ahead = forecast_of(planned, name) * (planned.steps - done) / planned.steps
        left = limit - spent[amount] / unit
        if math.isnan(ahead):
            raise ConfigError(
                f"run.budget.{name} = {limit:g} counts what is not known here",
                "this cluster states no figure for it", f"set {UNKNOWN[name]}",
            )  # fmt: skip
        if left <= 0:
            raise ConfigError(
                f"the budget of {said.format(limit)} is used up", f"{run_dir} has cost {said.format(limit - left)}",
                f"a larger run.budget.{name}",
            )  # fmt: skip
        steps = math.floor(left / ahead * (planned.steps - done)) if ahead else planned.steps - done
        text = (
            f"{said.format(left)} of {said.format(limit)} is left, and buys {min(steps, planned.steps - done):,} steps"
        )
        if ahead > left and budget.forecast == "refuse":
            raise DoesNotFit(
                f"the forecast of {said.format(ahead)} is beyond the budget",
                text, _cheaper(planned, budget, name, ahead, left, done + steps),
            )  # fmt: skip
        say(f"budget   {text}; the forecast is {said.format(ahead)}")


def forecast_of(planned: Planned, name: str) -> float:
    """Return what the whole run takes of a budget by the forecast, in the budget's unit; NaN where unknown."""
    amount, unit, _ = BUDGETS[name]
    if amount == "device_seconds":
        return planned.forecast.run_seconds.value * planned.cluster.devices / unit
    value: Any = getattr(planned.forecast, amount).value
    return value / unit


def _cheaper(planned: Planned, budget: BudgetSpec, name: str, ahead: float, left: float, steps: int) -> str:
    """Return what to try: the plan that takes the least of it, where that is within the budget, or fewer steps."""
    ways = [f'task.stop = "{steps} steps"'] if steps else []
    spec = planned.spec
    goal = GoalSpec(GOALS[name])
    try:
        other = plan_task(dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, goal=goal)))
        least = forecast_of(other, name) * ahead / forecast_of(planned, name)
    except PacelineError:
        least = math.inf
    if least <= left:
        ways.insert(0, f"plan.goal = '{goal}', which takes {BUDGETS[name][2].format(least)} as {other.plan}")
    return "; or ".join([*ways, f"a larger run.budget.{name}", "run.budget.forecast = 'tell'"])
