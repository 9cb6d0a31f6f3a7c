"""What plans take, as columns: time, memory, money, energy, carbon, the risk of each, and how well it serves a goal.

A goal's value is the weighted sum of what a plan takes, each quantity over the least that any plan of the search takes:

    value = sum over quantities of weight x quantity / least of that quantity

so that 1 is a plan that is best in all that counts. Memory that does not suffice shows in the first step, and another
plan is taken then, one that surely fits. So where that has a chance p, all but memory counts as

    quantity x (1 - p) + p x least of that quantity among plans whose own chance is at most 1 %

"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.bill import amounts
from paceline.plan.cost.columns import Columns, Floats
from paceline.plan.cost.pricing import memory_widths_of, step_seconds
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.risk.chance import chance_above

TIE_RATIO = 1.02  # values this close to the best are a tie: forecasts cannot tell them apart
SAFE = 0.01  # largest chance of running out of memory of a plan that surely fits
# Of plans of one cluster money is proportional to time, and carbon to energy, which nearly is: what stands in for a
# quantity that is unknown, or that no plan takes any of: devices of one's own have a price of 0.
STANDS_IN = {"money": "time", "carbon": "energy", "energy": "time"}


@dataclass(frozen=True)
class Values:
    """What plans take, one entry each; NaN where unknown. Money, energy and carbon are of the whole run."""

    time: Floats  # seconds per step
    memory: Floats  # bytes on the fullest device
    money: Floats  # USD
    energy: Floats  # kWh
    carbon: Floats  # grams of CO2 equivalent
    risk: Floats  # the chance that the memory does not suffice

    def __len__(self) -> int:
        return len(self.time)

    def take(self, chosen: object) -> Values:
        """Return the entries that an index, a slice or a mask chooses."""
        return Values(**{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)})

    def joined(self, others: Values) -> Values:
        """Return these entries and then others."""
        names = [field.name for field in dataclasses.fields(self)]
        return Values(**{name: np.concatenate([getattr(self, name), getattr(others, name)]) for name in names})

    def known(self, quantity: str) -> str:
        """Return the quantity, or the one that stands in for it where it is unknown, or nothing, of every plan."""
        while quantity in STANDS_IN and not _tells_apart(getattr(self, quantity)):
            quantity = STANDS_IN[quantity]
        return quantity

    def expected(self, quantity: str) -> Floats:
        """Return what plans are expected to take of a quantity, the risk of running out of memory counted in."""
        found: Floats = getattr(self, quantity)
        if quantity == "memory" or not len(self):
            return found
        safe = (self.risk <= max(SAFE, float(np.min(self.risk)))) & np.isfinite(found)
        return found * (1 - self.risk) + self.risk * np.min(found[safe]) if safe.any() else found


def values_of(context: PricedTask, columns: Columns, peaks: Floats, usable_bytes: float) -> Values:
    """Return what plans take; `peaks` are the bytes on their fullest devices, `usable_bytes` what there is."""
    seconds, busy = step_seconds(context, columns)
    usd, kwh, grams = (
        np.broadcast_to(amount, seconds.shape) for amount in amounts(context.cluster, seconds * context.steps, busy)
    )
    risk = chance_above(peaks, usable_bytes, *memory_widths_of(context, columns))
    return Values(seconds, peaks, usd, kwh, grams, risk)


def goal_values(values: Values, weights: Mapping[str, float]) -> Floats:
    """Return how well plans serve a goal: 1 is the best there could be; infinity where it is unknown."""
    total = np.zeros(len(values))
    for quantity, weight in weights.items():
        expected = values.expected(values.known(quantity))
        known = np.where(np.isfinite(expected), expected, np.inf)
        smallest = np.min(known, initial=np.inf)
        if np.isfinite(smallest):  # else it is unknown of all, and tells nothing apart
            total += weight * over_least(known)
    return total if total.any() else np.ones(len(values))


def over_least(amounts: Floats) -> Floats:
    """Return amounts over the least of them, which is 1 whatever it is: beside an amount of 0 others are infinite."""
    least = np.min(amounts, initial=np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(amounts == least, 1.0, amounts / least)
    return found


def _tells_apart(amounts: Floats) -> bool:
    """Return whether plans take something of a quantity, as far as that is known."""
    return bool((np.isfinite(amounts) & (amounts > 0)).any())
