"""What is left of a run's budgets, and what that still buys: steps, items, and a loss where the curve bears it.

A budget is the run's own, or one that it shares with the runs beside it: then what those have spent counts too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.account.timeline import held_devices
from paceline.history.records import Records, number, table, text
from paceline.plan.learn.curve import ExpectedLoss, expected_loss
from paceline.run.survive.budget import spent_in
from paceline.spec.journal.timing.held_devices import held_by_others
from paceline.spec.survive.budget import BUDGETS, SharedBudgetSpec
from paceline.units import format_count

TABLES = ("budget", "shared_budget")  # of a spec's `run`
SpentByTag = Callable[[str], Mapping[str, float]]  # a tag -> what the runs have spent that share it, by amount


def nobody(shared_by: str) -> Mapping[str, float]:
    """Return that nothing is spent by others."""
    return {}


@dataclass(frozen=True)
class BudgetLeft:
    """One budget: what is spent of its limit, and what the rest buys at the pace of the run.

    `spent` is of all who share it. `loss` is None where the run's curve is no sound ground for one.
    """

    name: str
    spent: float
    limit: float
    steps: float | None
    items: float | None
    loss: ExpectedLoss | None
    shared_by: str = ""  # the tag of the runs that share it; "": the run's own

    @property
    def left(self) -> float:
        """What is left of the limit, in the budget's unit."""
        return max(0.0, self.limit - self.spent)

    @property
    def text(self) -> str:
        """What is left of the budget, in one line."""
        said = BUDGETS[self.name][2]
        whose = SharedBudgetSpec(shared_by=self.shared_by).text if self.shared_by else ""
        buys = "what that buys is not known" if self.steps is None else f"which buys {format_count(self.steps)} steps"
        items = f", {format_count(self.items)} items" if self.items else ""
        loss = f", to {self.loss.text}" if self.loss is not None else ""
        return f"{said(self.left)} of {said(self.limit)}{whose} is left, {buys}{items}{loss}"


@dataclass(frozen=True)
class RunPace:
    """What a run has spent, and what a step of it costs: `paid` are the amounts that so many `steps` took."""

    spent: Mapping[str, float]
    paid: Mapping[str, float]
    steps: float
    items: float | None  # of a step
    curve: tuple[np.ndarray, np.ndarray]  # steps, and the losses there

    def left_of(self, name: str, limit: float, others: Mapping[str, float], shared_by: str) -> BudgetLeft:
        """Return what is left of one budget of BUDGETS, of which others have spent so much."""
        amount, unit, _ = BUDGETS[name]
        spent = (self.spent[amount] + others.get(amount, 0.0)) / unit
        each = self.paid[amount] / unit / self.steps if self.steps else 0.0
        buys = max(0.0, limit - spent) / each if each > 0 else None
        loss = expected_loss(*self.curve, buys) if buys else None
        total = self.items * buys if self.items and buys is not None else None
        return BudgetLeft(name, spent, limit, buys, total, loss, shared_by)


def budgets_left(records: Records, run_dir: Path | None = None) -> tuple[BudgetLeft, ...]:
    """Return what is left of each budget that the newest start has; without a directory nobody shares any."""
    start = records.starts[-1] if records.starts else None
    if start is None or not any(limits_in(start.spec)):
        return ()
    held = held_devices(records)
    newest = records.steps.where(records.steps.column("attempt") == (start.attempt or 1))
    own = spent_in([each for each in held if each.start.attempt == start.attempt])
    weight = newest.column("weight")
    items = float(np.nanmean(weight)) if len(weight) and not np.isnan(weight).all() else None
    curve = records.steps.column("step"), records.steps.column("loss")
    return lefts(start.spec, RunPace(spent_in(held), own, len(newest), items, curve), others_of(start.spec, run_dir))


def lefts(spec: Mapping[str, object], pace: RunPace, others: SpentByTag) -> tuple[BudgetLeft, ...]:
    """Return what is left of each budget of a journalled spec."""
    return tuple(
        pace.left_of(name, limit, others(shared_by) if shared_by else {}, shared_by)
        for name, limit, shared_by in limits_in(spec)
    )


def limits_in(spec: Mapping[str, object]) -> Iterator[tuple[str, float, str]]:
    """Yield the budgets of a journalled spec: the name, the limit, and the tag of the runs that share it."""
    for each in TABLES:
        limits = table(table(spec.get("run")).get(each))
        for name in BUDGETS:
            if (limit := number(limits.get(name))) is not None:
                yield name, limit, text(limits.get("shared_by"))


def others_of(spec: Mapping[str, object], run_dir: Path | None) -> SpentByTag:
    """Return what tells the spending of the runs beside a run's directory: it reads their journals at each call."""
    tags = table(table(spec.get("run")).get("tags"))

    def spent(shared_by: str) -> Mapping[str, float]:
        return spent_in(held_by_others(run_dir, tags, shared_by) if run_dir is not None else ())

    return spent
