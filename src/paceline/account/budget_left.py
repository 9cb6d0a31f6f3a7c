"""What is left of a run's budgets, and what that still buys: steps, items, and a loss where the curve bears it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.account.timeline import held_devices
from paceline.plan.learn.curve import ExpectedLoss, expected_loss
from paceline.report.records import Records, number, table
from paceline.run.survive.budget import spent_in
from paceline.spec.survive.budget import BUDGETS
from paceline.units import format_count


@dataclass(frozen=True)
class BudgetLeft:
    """One budget: what is spent of its limit, and what the rest buys at the pace of the newest start.

    `loss` is None where the run's curve is no sound ground for one.
    """

    name: str
    spent: float
    limit: float
    steps: float | None
    items: float | None
    loss: ExpectedLoss | None

    @property
    def text(self) -> str:
        """What is left of the budget, in one line."""
        said = BUDGETS[self.name][2]
        left = max(0.0, self.limit - self.spent)
        buys = "what that buys is not known" if self.steps is None else f"which buys {format_count(self.steps)} steps"
        items = f", {format_count(self.items)} items" if self.items else ""
        loss = f", to {self.loss.text}" if self.loss is not None else ""
        return f"{said(left)} of {said(self.limit)} is left, {buys}{items}{loss}"


def budgets_left(records: Records) -> tuple[BudgetLeft, ...]:
    """Return what is left of each budget that the newest start has; what others spent of a shared one is not in it."""
    start = records.starts[-1] if records.starts else None
    limits = table(table(start.spec.get("run")).get("budget")) if start else {}
    found = {name: limit for name in BUDGETS if (limit := number(limits.get(name))) is not None}
    if not found or start is None:
        return ()
    held = held_devices(records)
    spent = spent_in(held)
    newest = records.steps.where(records.steps.column("attempt") == (start.attempt or 1))
    own = spent_in([each for each in held if each.start.attempt == start.attempt])
    steps, weight = len(newest), newest.column("weight")
    items = float(np.nanmean(weight)) if steps and not np.isnan(weight).all() else None
    lefts = []
    for name, limit in found.items():
        amount, unit, _ = BUDGETS[name]
        each = own[amount] / unit / steps if steps else 0.0
        buys = max(0.0, limit - spent[amount] / unit) / each if each > 0 else None
        loss = expected_loss(records.steps.column("step"), records.steps.column("loss"), buys) if buys else None
        total = items * buys if items and buys is not None else None
        lefts.append(BudgetLeft(name, spent[amount] / unit, limit, buys, total, loss))
    return tuple(lefts)
