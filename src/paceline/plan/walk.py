"""The walk through a space of plans: the most promising layouts first, and as few prices as the best plan needs."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.plan.cost.bound import least_seconds
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.memory import memory_terms
from paceline.plan.cost.total import price
from paceline.plan.forecast import Forecast, Term
from paceline.plan.layout import Layout
from paceline.plan.plan import RECOMPUTE, Plan, PlanSpec
from paceline.plan.refusals import pipeline_stages
from paceline.plan.space import MODEL_AXES, Refusal, pipelines, plans_of

TIE_RATIO = 1.02  # values this close to the best are a tie: forecasts cannot tell them apart
PRICED_IN_FULL = 1_500  # plans; beyond them, only layouts that could still be the best are priced
PRICED_AT_MOST = 4_000

Groups = list[list[Plan]]  # plans that differ in the micro-batch alone together, smallest first


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and its price."""

    plan: Plan
    forecast: Forecast


@dataclass
class Walk:
    """What has been found so far. `goal_value` is what to minimise of a forecast, `scale` of it a second a step is."""

    context: Context
    constraints: PlanSpec
    base: Plan
    modes: tuple[tuple[str, float], ...]  # of recompute, with their budgets
    refused: list[Refusal]
    goal_value: Callable[[Forecast], float]
    scale: float
    does_not_fit: Callable[[tuple[Term, ...]], str]
    fits: list[Candidate] = field(default_factory=list)
    best: float = math.inf
    nearest: Refusal | None = None  # the refused plan that needs the least memory, and how much it needs
    nearest_bytes: float = math.inf
    unpriced: int = 0

    def through(self, layouts: list[Layout]) -> None:
        """Price the layouts' plans, those that promise most first, until the rest cannot be the best.

        A layout's promise is what none of its plans undercuts; once its turn comes, of those of its plans that fit.
        """
        queue: list[tuple[float, int, Layout, Groups | None]] = [
            (self._promise(layout), index, layout, None) for index, layout in enumerate(layouts)
        ]
        heapq.heapify(queue)
        while queue:
            promise, index, layout, groups = heapq.heappop(queue)
            if self._is_hopeless(promise):
                self.unpriced += len(queue) + 1
                return
            if groups is None:
                found = plans_of(self.context, self.constraints, layout, self.base, self.modes, self.refused)
                groups = [group for group in found if group]
                if not self._wants_every_plan(layout):
                    groups = self._possible(groups)
                    if groups:
                        promise = self._least(least_seconds(self.context, group[0]) for group in groups)
                        heapq.heappush(queue, (promise, index, layout, groups))
                    continue
            self._price(layout, groups)

    def _is_hopeless(self, promise: float) -> bool:
        priced = len(self.fits)
        return priced > PRICED_AT_MOST or (priced > PRICED_IN_FULL and promise * self.scale > self.best * TIE_RATIO)

    def _wants_every_plan(self, layout: Layout) -> bool:
        """Return whether plans that others surpass are priced too: on the data axes alone, or to save memory."""
        return max(getattr(layout, axis) for axis in MODEL_AXES) == 1 or self.constraints.goal == "memory"

    def _promise(self, layout: Layout) -> float:
        """Return seconds per step that no plan of the layout undercuts, by arithmetic alone; infinity if unknown."""
        shown = dataclasses.replace(self.base, layout=layout)
        tried = (
            dataclasses.replace(shown, schedule=schedule, virtual_stages=several, stages=stages)
            for schedule, several, stages in pipelines(self.context, self.constraints, layout)
        )
        return self._least(
            least_seconds(self.context, plan) for plan in tried if not pipeline_stages(plan, self.context.profile)
        )

    def _least(self, seconds: Iterable[float]) -> float:
        if self.constraints.goal == "memory":  # time bounds nothing there
            return 0.0
        return min((value for value in seconds if math.isfinite(value)), default=math.inf)

    def _possible(self, groups: Groups) -> Groups:
        """Return the groups of which at least the smallest micro-batch fits.

        The leanest are tried first: what recomputes or shards less than one that does not fit is left out unpriced.
        """
        kept: Groups = []
        too_large: list[Plan] = []
        for group in reversed(groups):
            plan = group[0]
            # Recompute saves nothing on a stage of one block, whose values are all there while it is recomputed.
            several = min(plan.stages, default=self.context.profile.repeated_blocks) > 1
            if any(is_lighter(plan, other) and (several or plan.recompute == other.recompute) for other in too_large):
                continue
            if grows(plan) and self._memory(plan) is None:
                too_large.append(plan)
            else:
                kept.append(group)
        return kept[::-1]

    def _memory(self, plan: Plan) -> tuple[Term, ...] | None:
        """Return the plan's memory, or None after refusing it where that does not fit."""
        memory = tuple(memory_terms(self.context, plan))
        because = self.does_not_fit(memory)
        if not because:
            return memory
        self.refused.append(Refusal(plan, because))
        peak = sum(term.value for term in memory)
        if peak < self.nearest_bytes:
            self.nearest, self.nearest_bytes = self.refused[-1], peak
        return None

    def _price(self, layout: Layout, groups: Groups) -> None:
        ample: list[Plan] = []  # plans beside which more recompute and sharding only cost time
        for group in groups:
            if not self._wants_every_plan(layout) and any(is_lighter(plan, group[0]) for plan in ample):
                continue
            before = len(self.fits)
            for plan in group:
                memory = self._memory(plan)
                if memory is not None:
                    self.fits.append(Candidate(plan, price(self.context, plan, memory)))
                    self.best = min(self.best, self.goal_value(self.fits[-1].forecast))
                elif grows(plan):
                    break  # larger micro-batches need more
            if len(self.fits) - before == len(group):
                ample.append(group[0])


def is_lighter(plan: Plan, other: Plan) -> bool:
    """Return whether a plan of the same layout shards and recomputes no more than another: it is never slower."""
    same = (plan.schedule, plan.stages) == (other.schedule, other.stages)
    keeps, others = ((RECOMPUTE.index(one.recompute), -one.recompute_budget) for one in (plan, other))
    return same and plan.zero <= other.zero and keeps <= others and plan.offload == other.offload


def grows(plan: Plan) -> bool:
    """Return whether memory grows with the micro-batch: ZeRO-1 holds less once a single one is left to sum up."""
    return not (plan.zero == 1 and plan.layout.state_degree > 1)
