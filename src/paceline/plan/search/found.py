"""What a search has found: plans that fit, in order, and those that were refused, each put in words when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from paceline.plan.cost.columns import Columns, Floats
from paceline.plan.cost.memory.usable import HEADROOM, needed_terms, usable_bytes
from paceline.plan.cost.pricing import memory_of, memory_widths_of, price, price_all
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.risk.chance import margin
from paceline.plan.search.limits import Limits
from paceline.plan.search.space import (
    Refusal,
)
from paceline.plan.search.values import Values
from paceline.spec.forecast import Forecast
from paceline.spec.plan import Plan, PlanSpec
from paceline.units import format_bytes, format_sizes

WORDED = 512  # plans whose terms are put in words at once, where many are listed


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and its price."""

    plan: Plan
    forecast: Forecast


@dataclass(frozen=True)
class Candidates(Sequence[Candidate]):
    """Plans that fit, best first. They stand in columns; plans and terms in words are made for those looked at.

    `values` are what they take, `scores` how well they serve the goal: 1 would be the best in all that counts.
    """

    context: PricedTask
    columns: Columns
    values: Values
    scores: Floats

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        if isinstance(index, slice):
            return tuple(self._worded(self.columns.take(index)))
        return next(iter(self._worded(self.columns.take([range(len(self))[index]]))))

    def __iter__(self) -> Iterator[Candidate]:
        for at in range(0, len(self), WORDED):
            yield from self._worded(self.columns.take(slice(at, at + WORDED)))

    def _worded(self, columns: Columns) -> Iterator[Candidate]:
        if len(columns):
            yield from (Candidate(*priced) for priced in price_all(self.context, columns))

    def plan(self, place: int) -> Plan:
        """Return one plan in full, without its price."""
        return self.context.plan_of(self.columns, place)


@dataclass(frozen=True)
class Refusals(Sequence[Refusal]):
    """Plans that were not taken: those that cannot be had, those beyond a deadline or budget, those that do not fit.

    The second are in the order of the goal, the last by memory, the least first.
    """

    told: tuple[Refusal, ...]
    context: PricedTask
    too_large: Columns
    beyond: Columns
    limits: Limits
    memory_risk: float

    def __len__(self) -> int:
        return len(self.told) + len(self.beyond) + len(self.too_large)

    @overload
    def __getitem__(self, index: int) -> Refusal: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Refusal, ...]: ...
    def __getitem__(self, index: int | slice) -> Refusal | tuple[Refusal, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(len(self))[index])
        place = range(len(self))[index]
        if place < len(self.told):
            return self.told[place]
        place -= len(self.told)
        context = self.context
        if place < len(self.beyond):
            plan = context.plan_of(self.beyond, place)
            return Refusal(plan, self.limits.refusal(price(context, plan)))
        place -= len(self.beyond)
        refused = memory_refusal(context, self.too_large.take([place]), self.memory_risk)
        return Refusal(context.plan_of(self.too_large, place), refused)


@dataclass(frozen=True)
class SearchResult:
    """The best plan, all that fit in order, all that were refused, and why the precision is what it is."""

    best: Candidate
    candidates: Candidates
    refused: Refusals
    precision_because: str
    kept_because: str = ""  # why the best is not the first by the forecast: the simpler one, or what runs cannot tell


def memory_refusal(context: PricedTask, columns: Columns, risk: float = PlanSpec.memory_risk) -> str:
    """Return why the memory of a plan, the one in `columns`, does not fit, in numbers; empty where it fits or the
    device's memory is unknown.

    `risk` is the largest chance of running out of memory that a plan may have.
    """
    usable = usable_bytes(context.cluster)
    memory = needed_terms(context.cluster, memory_of(context, columns.plan(0)))
    ratio = float(np.exp(margin(risk, *memory_widths_of(context, columns)))[0])
    most = sum(term.value for term in memory) * ratio
    if not most > usable:
        return ""
    largest = sorted(memory, key=lambda term: -term.value)[:2]
    parts = ", ".join(f"{term.name} {format_bytes(term.value)}" for term in largest)
    needs, there = format_sizes(most, usable)
    sure = "" if risk == PlanSpec.memory_risk else f" with a chance of {1 - risk:.0%}"
    return f"needs up to {needs}{sure} of {there} usable per device ({HEADROOM:.0%} headroom kept); {parts}"
