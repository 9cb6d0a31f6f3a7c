"""A run's budget before it starts: refused where it is used up, not known, or less than the forecast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.planned import Planned, plan_task
from paceline.run.survive.budget import spent_by_all
from paceline.session.replanner import with_devices
from paceline.spec.arguments import run_directory
from paceline.spec.journal.reading import read_tail_step
from paceline.spec.plan import GoalSpec
from paceline.spec.run import RunSpec
from paceline.spec.survive.budget import BUDGETS, BudgetSpec
from paceline.units import format_seconds

Say = Callable[[str], None]

# What to state where a forecast cannot be made, and the goal whose plans need the least of it.
UNKNOWN = {
    "usd": "cluster.price_usd_per_device_hour",
    "kwh": "cluster.watts_per_device",
    "kg_co2e": "cluster.region, cluster.carbon_g_per_kwh or run.when.carbon",
}
GOALS = {"usd": "money", "kwh": "energy", "kg_co2e": "carbon", "device_hours": "money"}


def check_budget(planned: Planned, say: Say) -> None:
    """Say what the run's budgets leave; return where there is none.

    Raises ConfigError where it is used up or counts what is not known, as `run.usd_limit` may too, and DoesNotFit where
    the forecast of the steps that are left is beyond it and the spec does not say to train all the same.
    """
    limit = planned.spec.run.usd_limit
    if limit is not None and math.isnan(forecast_of(planned, "usd")):
        raise _unknown(f"run.usd_limit = {limit:g}", "usd")
    for budget in planned.spec.run.budgets:
        _check(planned, budget, say)


def _check(planned: Planned, budget: BudgetSpec, say: Say) -> None:
    run_dir = run_directory(planned.spec)
    spent, done = spent_by_all(budget, planned.spec.run, run_dir), min(read_tail_step(run_dir), planned.steps)
    for name, limit in budget.limits.items():
        amount, unit, said = BUDGETS[name]
        ahead = forecast_of(planned, name) * (planned.steps - done) / planned.steps
        left = limit - spent[amount] / unit
        if math.isnan(ahead):
            raise _unknown(f"{budget.table_name}.{name} = {limit:g}", name)
        if left <= 0:
            raise ConfigError(
                f"the budget of {said(limit)}{budget.text} is used up",
                f"{_whose(budget, run_dir)} cost {said(limit - left)}",
                f"a larger {budget.table_name}.{name}",
            )  # fmt: skip
        steps = math.floor(left / ahead * (planned.steps - done)) if ahead else planned.steps - done
        text = (
            f"{said(left)} of {said(limit)}{budget.text} is left, and buys {min(steps, planned.steps - done):,} steps"
        )
        if ahead > left and budget.forecast == "refuse":
            raise DoesNotFit(
                f"the forecast of {said(ahead)} is beyond the budget{budget.text}",
                text, _cheaper(planned, budget, name, ahead, left, done + steps),
            )  # fmt: skip
        say(f"budget   {text}; the forecast is {said(ahead)}")


def _unknown(option: str, name: str) -> ConfigError:
    """Return the error for a limit on what nobody could count: it would never end the run."""
    return ConfigError(
        f"{option} counts what is not known here", "this cluster states no figure for it", f"set {UNKNOWN[name]}"
    )


def used_up(run: RunSpec, run_dir: Path) -> tuple[str, BudgetSpec] | None:
    """Return which of a run's budgets is used up by now, in words and itself; None for none.

    What those have spent that it is shared with counts.
    """
    for budget in run.budgets:
        spent = spent_by_all(budget, run, run_dir)
        for name, limit in budget.limits.items():
            amount, unit, said = BUDGETS[name]
            if spent[amount] / unit >= limit:
                return f"the budget of {said(limit)}{budget.text} is used up", budget
    return None


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
    goal = GoalSpec(GOALS[name])
    found = [(forecast_of(other, name), other) for other in _others(planned, goal)]
    share = ahead / forecast_of(planned, name)  # of the run that is still to be made
    within = [(least * share, other) for least, other in found if least * share <= left]
    if within:
        least, other = min(within, key=lambda each: each[0])
        fewer = other.cluster.devices < planned.cluster.devices
        said = f"cluster.devices = {other.cluster.devices} and " if fewer else ""
        takes = f"{BUDGETS[name][2](least)} and {format_seconds(other.forecast.run_seconds.value * share)}"
        ways.insert(0, f"{said}plan.goal = '{goal}', which takes {takes} as {other.plan}")
    return "; or ".join([*ways, f"a larger {budget.table_name}.{name}", f"{budget.table_name}.forecast = 'tell'"])


def _others(planned: Planned, goal: GoalSpec) -> Iterator[Planned]:
    """Yield the best plans for a goal, of the cluster and of half of its devices, a quarter and so on, that fit."""
    spec, devices = planned.spec, planned.cluster.devices
    aimed = dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, goal=goal))
    while devices:
        fewer = devices < planned.cluster.devices
        cluster = with_devices(spec.cluster, devices) if fewer else spec.cluster
        try:
            yield plan_task(dataclasses.replace(aimed, cluster=cluster))
        except (ConfigError, DoesNotFit):
            return  # with fewer devices it does not either, or the spec asks for a layout of its own
        devices //= 2


def _whose(budget: BudgetSpec, run_dir: Path) -> str:
    """Return whose spending a budget counts, for a sentence."""
    shared = budget.shared_by
    return f"{run_dir} and the runs of the same {shared} have" if shared else f"{run_dir} has"
