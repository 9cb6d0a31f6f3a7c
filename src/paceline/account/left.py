"""What is left of a run's budgets, and what that still buys: steps, items, and a loss where the curve bears it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.account.timeline import held_devices
from paceline.report.records import Records, number, table
from paceline.run.survive.budget import spent_in
from paceline.spec.survive.budget import BUDGETS
from paceline.units import format_count

EXPONENTS = np.linspace(0.05, 1.5, 30)  # of the power laws that are tried
BINS, LEAST_STEPS = 40, 200
LEFT_OUT = 0.3  # of the bins, that the law must foretell
OFF = 0.02  # of the loss, that it may be off by there
FARTHEST = 3.0  # times the steps made, beyond which nothing is foretold


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
    loss: float | None

    @property
    def text(self) -> str:
        """It in one line."""
        said = BUDGETS[self.name][2]
        left = max(0.0, self.limit - self.spent)
        buys = "what that buys is not known" if self.steps is None else f"which buys {format_count(self.steps)} steps"
        items = f", {format_count(self.items)} items" if self.items else ""
        loss = f", to a loss of about {self.loss:.3g}" if self.loss is not None else ""
        return f"{said.format(left)} of {said.format(self.limit)} is left, {buys}{items}{loss}"


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


def expected_loss(steps: NDArray[np.float64], losses: NDArray[np.float64], further: float) -> float | None:
    """Return the loss after so many further steps by a power law c + a s^-b; None where it is no sound ground.

    It is one where the law, fitted without the last part of the curve, foretells that part.
    """
    known = np.isfinite(losses) & np.isfinite(steps) & (steps > 0)
    steps, losses = steps[known], losses[known]
    if len(steps) < LEAST_STEPS or further > FARTHEST * steps.max():
        return None
    edges = np.unique(np.geomspace(1, steps.max() + 1, BINS).astype(int))
    places = np.digitize(steps, edges)
    bins = [places == place for place in np.unique(places)]
    x = np.array([steps[each].mean() for each in bins])
    y = np.array([np.median(losses[each]) for each in bins])
    first = max(5, int(len(x) * (1 - LEFT_OUT)))
    if len(x) - first < 3:
        return None
    law = _fitted(x[:first], y[:first])
    off = np.abs(_of(law, x[first:]) - y[first:]) / np.abs(y[first:])
    if off.max() > OFF:
        return None
    found = float(_of(_fitted(x, y), np.array([steps.max() + further]))[0])
    return found if math.isfinite(found) and 0 < found <= y[-1] * (1 + OFF) else None


def _fitted(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return (c, a, b) of the power law with the least squares, b of EXPONENTS."""
    best: tuple[float, tuple[float, float, float]] | None = None
    for b in EXPONENTS:
        design = np.stack([np.ones_like(x), x**-b], axis=1)
        (c, a), *_ = np.linalg.lstsq(design, y, rcond=None)
        error = float(((design @ np.array([c, a]) - y) ** 2).sum())
        if best is None or error < best[0]:
            best = error, (float(c), float(a), float(b))
    assert best is not None
    return best[1]


def _of(law: tuple[float, float, float], x: NDArray[np.float64]) -> NDArray[np.float64]:
    c, a, b = law
    return c + a * x**-b
