"""What a run has cost so far, beside the promise; what is left of budgets and of time, at the pace of now."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.account.budget_left import BudgetLeft, RunPace, SpentByTag, lefts
from paceline.history.records import NO_START, number, table
from paceline.observe.live.run import LiveRun
from paceline.run.survive.budget import spent_in
from paceline.spec.journal.timing.held_devices import held_time
from paceline.spec.survive.budget import BUDGETS
from paceline.units import format_energy

WORDS = {"usd": "money", "kwh": "energy", "kg_co2e": "carbon", "device_hours": "device-hours"}


@dataclass(frozen=True)
class SpentAmount:
    """One amount of BUDGETS, in its unit. What is not known, or not set, is None."""

    name: str
    spent: float
    promised_so_far: float | None  # of the steps that are done, by the forecast
    promised: float | None  # of the whole run
    at_end: float | None  # what all of it will come to, at the pace of now

    def said(self, value: float | None) -> str:
        """Return a value of this amount for people."""
        if value is None:
            return "–"
        if self.name == "kwh":
            return format_energy(value)[0]
        return BUDGETS[self.name][2](value).removesuffix(f" {WORDS[self.name]}")


def spent_so_far(run: LiveRun) -> list[SpentAmount]:
    """Return every amount that has a rate, by the forecast's rates or the cluster's figures."""
    spent, starts = _spent(run), run.on_one_clock()[0]
    first, done, planned = (*starts, NO_START)[0], run.steps_done, run.steps_planned
    forecast, devices = first.forecast, first.world_size or 1
    found = []
    for name, (amount, unit, _) in BUDGETS.items():
        if amount == "device_seconds":
            whole = number(table(forecast.get("run_seconds")).get("value"))
            whole = None if whole is None else whole * devices
        else:
            whole = number(table(forecast.get(amount)).get("value"))
        own = spent[amount] / unit
        if not own and whole is None:
            continue
        promised = None if whole is None else whole / unit
        so_far = promised * done / planned if promised is not None and planned else None
        at_end = own * planned / done if planned and done else None
        found.append(SpentAmount(name, own, so_far, promised, at_end))
    return found


def left_so_far(run: LiveRun, others: SpentByTag) -> tuple[BudgetLeft, ...]:
    """Return what is left of each budget of the newest start, and what it buys at the pace of the whole run."""
    if not run.starts:
        return ()
    taken, spent = run.steps.taken(), _spent(run)
    items = run.items / steps if (steps := run.counts["step"]) else None
    curve = taken.column("step"), taken.column("loss")
    return lefts(run.starts[max(run.starts)].spec, RunPace(spent, spent, run.steps_done, items, curve), others)


def _spent(run: LiveRun) -> dict[str, float]:
    starts, spans, recoveries, _ = run.on_one_clock()
    return spent_in(held_time(starts, spans, recoveries))


def seconds_left(run: LiveRun) -> float | None:
    """Return how long the steps that are left take, with evaluations and checkpoints as often as so far."""
    step, planned, done = run.step_seconds, run.steps_planned, run.steps_done
    if step is None or not planned or run.end is not None:
        return None
    steps = run.seconds["training"] + run.seconds["data"]
    beside = run.seconds["evaluation"] + run.seconds["checkpoints"]
    return max(0, planned - done) * step * (1 + beside / steps if steps else 1.0)
