"""Search: price every plan that a task, a cluster and a spec's constraints allow, and rank those that fit."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paceline.cluster.cluster import Cluster
from paceline.errors import DoesNotFit
from paceline.plan.cost.bound import least_seconds
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.memory import memory_terms
from paceline.plan.cost.total import memory_estimate, money_energy_carbon, price
from paceline.plan.forecast import Estimate, Forecast, Term
from paceline.plan.layout import Layout
from paceline.plan.plan import RECOMPUTE, Plan, PlanSpec
from paceline.plan.refusals import pipeline_stages
from paceline.plan.space import (
    MODEL_AXES,
    Refusal,
    allowed_layouts,
    base_plan,
    pipelines,
    plans_of,
    recompute_modes,
)
from paceline.task.profile import ModelProfile
from paceline.units import format_bytes, format_rate

HEADROOM = 0.05  # of a device's memory, kept free: allocator rounding, other processes, evaluation
TIE_RATIO = 1.02  # values this close to the best are a tie: forecasts cannot tell them apart
PRICED_IN_FULL = 1_500  # plans; beyond them, only layouts that could still be the best are priced
PRICED_AT_MOST = 3_000  # plans, most promising layouts first


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and its price."""

    plan: Plan
    forecast: Forecast


@dataclass(frozen=True)
class SearchResult:
    """The best plan, all that fit in order, all that were refused, and why the precision is what it is.

    `unpriced` layouts of a large space were left out, since they compute for longer than the best plan takes.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    precision_because: str
    unpriced: int = 0


def search(
    profile: ModelProfile,
    cluster: Cluster,
    constraints: PlanSpec,
    *,
    batch_samples: int,
    steps: int,
    optimizer: str = "adamw",
) -> SearchResult:
    """Return all plans of exactly `cluster.devices` devices that keep the constraints, ranked by `constraints.goal`.

    Raises DoesNotFit where none fits, with the one that came nearest, and ConfigError for constraints that
    contradict each other or the cluster.
    """
    context = Context(profile, cluster, batch_samples, steps, optimizer)
    precision, precision_because = choose_precision(context, constraints.precision)
    refused: list[Refusal] = []
    fits: list[Candidate] = []
    base = base_plan(constraints, precision, batch_samples)
    modes = recompute_modes(context, constraints)
    layouts = allowed_layouts(context, constraints, base, refused)
    best, priced, unpriced = math.inf, 0, 0
    nearest = Nearest()
    scale = _per_second(context, constraints.goal)
    for bound, layout in _most_promising(context, constraints, base, layouts):
        hopeless = best * TIE_RATIO if priced > PRICED_IN_FULL else math.inf
        if priced > PRICED_AT_MOST or bound * scale > hopeless:
            unpriced += 1
            continue
        every_plan = max(getattr(layout, axis) for axis in MODEL_AXES) == 1 or constraints.goal == "memory"
        groups = [group for group in plans_of(context, constraints, layout, base, modes, refused) if group]
        if not every_plan:
            groups = [group for group in groups if not least_seconds(context, group[0]) * scale > hopeless]
            groups = _possible(context, groups, refused, nearest)
        ample: list[Plan] = []  # plans beside which more recompute and sharding only cost time
        for group in groups:
            if not every_plan and any(_lighter(plan, group[0]) for plan in ample):
                continue
            fitting = 0
            for plan in group:
                memory = tuple(memory_terms(context, plan))
                because = memory_refusal(memory, cluster)
                if because:
                    refused.append(Refusal(plan, because))
                    nearest.offer(memory, refused[-1])
                    if _grows(plan):
                        break  # larger micro-batches need more
                    continue
                fits.append(Candidate(plan, price(context, plan, memory)))
                best = min(best, _goal_value(fits[-1].forecast, constraints.goal))
                fitting += 1
                priced += 1
            if fitting == len(group):
                ample.append(group[0])
    if not fits:
        raise _nothing_fits(profile, cluster, refused, nearest.refusal)
    fits.sort(key=lambda candidate: _rank(candidate, constraints.goal, best))
    return SearchResult(fits[0], tuple(fits), tuple(refused), precision_because, unpriced)


def _most_promising(
    context: Context, constraints: PlanSpec, base: Plan, layouts: list[Layout]
) -> list[tuple[float, Layout]]:
    """Return (seconds per step that none of its plans undercuts, layout), the least first, as far as that is known."""
    found = []
    for layout in layouts:
        bounds: list[float] = []
        for schedule, several, stages in pipelines(context, constraints, layout):
            plan = dataclasses.replace(base, layout=layout, schedule=schedule, virtual_stages=several, stages=stages)
            if not pipeline_stages(plan, context.profile):
                bounds.append(least_seconds(context, plan))
        least = min(bounds, default=math.inf)
        found.append((least, layout))
    if constraints.goal == "memory":  # time bounds nothing there
        return [(-math.inf, layout) for _, layout in found]
    return sorted(found, key=lambda pair: (not math.isfinite(pair[0]), pair[0]))


def _possible(context: Context, groups: list[list[Plan]], refused: list[Refusal], nearest: Nearest) -> list[list[Plan]]:
    """Return the groups of which at least the smallest micro-batch fits.

    The leanest are tried first: what recomputes or shards less than one that does not fit is left out unpriced.
    """
    kept: list[list[Plan]] = []
    too_large: list[Plan] = []
    for group in reversed(groups):
        plan = group[0]
        # Recompute saves nothing on a stage of one block, whose values are all there while it is recomputed.
        several = min(plan.stages, default=context.profile.repeated_blocks) > 1
        if any(_lighter(plan, other) and (several or plan.recompute == other.recompute) for other in too_large):
            continue
        memory = tuple(memory_terms(context, plan))
        because = memory_refusal(memory, context.cluster)
        if because and _grows(plan):
            too_large.append(plan)
            refused.append(Refusal(plan, because))
            nearest.offer(memory, refused[-1])
        else:
            kept.append(group)
    return kept[::-1]


def _per_second(context: Context, goal: str) -> float:
    """Return what the goal counts for a second per step, as `_goal_value` does."""
    usd, kwh, _ = money_energy_carbon(context.cluster, Estimate(float(context.steps), 0.0, 0.0, "measured"))
    value = {"money": usd.value, "energy": kwh.value}.get(goal, math.nan)
    return value if math.isfinite(value) else 1.0


@dataclass
class Nearest:
    """The refused plan that needs the least memory."""

    refusal: Refusal | None = None
    peak_bytes: float = math.inf

    def offer(self, memory: tuple[Term, ...], refusal: Refusal) -> None:
        """Take the plan if it needs less than the one so far."""
        peak = sum(term.value for term in memory)
        if peak < self.peak_bytes:
            self.refusal, self.peak_bytes = refusal, peak


def _lighter(plan: Plan, other: Plan) -> bool:
    """Return whether a plan of the same layout shards and recomputes no more than another: it is never slower."""
    same = (plan.schedule, plan.stages) == (other.schedule, other.stages)
    return same and plan.zero <= other.zero and RECOMPUTE.index(plan.recompute) <= RECOMPUTE.index(other.recompute)


def _grows(plan: Plan) -> bool:
    """Return whether memory grows with the micro-batch: ZeRO-1 holds less once a single one is left to sum up."""
    return not (plan.zero == 1 and plan.layout.state_degree > 1)


def choose_precision(context: Context, asked: str) -> tuple[str, str]:
    """Return the precision and the reason: the one asked for, or bf16 where the device computes faster in it."""
    if asked != "auto":
        return asked, f"{asked} as the spec asks"
    widest = max(context.all_counts.matmul, key=lambda pair: pair[1], default=(256, 0.0))[0]
    fp32, bf16 = context.rates("fp32").product_rate(widest), context.rates("bf16").product_rate(widest)
    source = context.cluster.device.matmul_source
    if math.isfinite(bf16) and not bf16 <= fp32:
        rates = f"{format_rate(bf16, 'FLOP')} against {format_rate(fp32, 'FLOP')} in fp32"
        return "bf16", f"bf16: {rates} at width {widest} ({source})"
    if not math.isfinite(bf16):
        return "fp32", f"fp32: this device's bf16 rate is unknown ({source} figures)"
    return "fp32", f"fp32: bf16 is not faster here ({format_rate(bf16, 'FLOP')} at width {widest}, {source})"


def memory_refusal(memory: tuple[Term, ...], cluster: Cluster) -> str:
    """Return why a plan's memory does not fit, in numbers; empty where it fits or the device's memory is unknown."""
    usable = cluster.device.memory_bytes.value * (1 - HEADROOM)
    peak = memory_estimate(memory)
    if not peak.high > usable:
        return ""
    largest = sorted(memory, key=lambda term: -term.value)[:2]
    parts = ", ".join(f"{term.name} {format_bytes(term.value)}" for term in largest)
    return (
        f"needs up to {format_bytes(peak.high)} of {format_bytes(usable)} usable per device "
        f"({HEADROOM:.0%} headroom kept); {parts}"
    )


def _goal_value(forecast: Forecast, goal: str) -> float:
    """Return what the goal minimises; infinity where it is unknown.

    On one cluster money and energy are proportional to time, so where they are unknown, time ranks the same.
    """
    asked = {"memory": forecast.peak_bytes, "money": forecast.usd, "energy": forecast.kwh}.get(goal)
    value = forecast.step_seconds.value if asked is None or not math.isfinite(asked.value) else asked.value
    return value if math.isfinite(value) else math.inf


def _rank(candidate: Candidate, goal: str, best: float) -> tuple[float, ...]:
    """Return the sort key: what is beyond a tie with the best, then fewer surprises.

    Surprises are, in falling weight: axes that split the model or a sequence, recompute, sharding classes that
    communicate more, memory.
    """
    forecast, plan = candidate.forecast, candidate.plan
    value = _goal_value(forecast, goal)
    beyond = 0.0 if not value > best * TIE_RATIO else value
    classes = plan.zero if plan.layout.state_degree > 1 else 0
    axes = sum(getattr(plan.layout, axis) > 1 for axis in MODEL_AXES)
    return (beyond, axes, RECOMPUTE.index(plan.recompute), classes, forecast.peak_bytes.value, value)


def _nothing_fits(
    profile: ModelProfile, cluster: Cluster, refused: list[Refusal], nearest: Refusal | None
) -> DoesNotFit:
    what = f"{profile.name} does not fit {cluster.devices} x {cluster.device.name}"
    if nearest is None:
        return DoesNotFit(what, refused[-1].because if refused else "no layout is possible", "fewer devices")
    return DoesNotFit(
        f"{what}: none of {len(refused)} plans",
        f"the smallest, {nearest.plan}, {nearest.because}",
        "more devices, a smaller model or shorter samples, or unset constraints of [plan]",
    )
