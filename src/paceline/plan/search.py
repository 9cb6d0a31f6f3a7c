"""Search: price every plan that a task, a cluster and a spec's constraints allow, and rank those that fit."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from paceline.cluster.cluster import Cluster
from paceline.errors import DoesNotFit
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.price import amounts
from paceline.plan.cost.total import memory_estimate
from paceline.plan.forecast import Forecast, Term
from paceline.plan.plan import OFFLOAD, RECOMPUTE, Plan, PlanSpec
from paceline.plan.space import MODEL_AXES, Refusal, allowed_layouts, base_plan, recompute_modes
from paceline.plan.walk import TIE_RATIO, Candidate, Walk
from paceline.task.profile import ModelProfile
from paceline.units import format_bytes, format_rate

HEADROOM = 0.05  # of a device's memory, kept free: allocator rounding, other processes, evaluation


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
    base = base_plan(constraints, precision, batch_samples)
    modes = recompute_modes(context, constraints)
    layouts = allowed_layouts(context, constraints, base, refused)

    def walk_from(base: Plan) -> Walk:
        walk = Walk(
            context,
            constraints,
            base,
            modes,
            refused,
            goal_value=lambda forecast: _goal_value(forecast, constraints.goal),
            scale=_per_second(context, constraints.goal),
            does_not_fit=lambda memory: memory_refusal(memory, cluster),
        )
        walk.through(layouts)
        return walk

    walk = walk_from(base)
    # Host memory is the last resort, the least of it first; on a CPU it is the device's own.
    for offload in OFFLOAD[1:] if constraints.offload == "auto" and cluster.device.kind != "cpu" else ():
        if not walk.fits:
            walk = walk_from(dataclasses.replace(base, offload=offload))
    if not walk.fits:
        raise _nothing_fits(profile, cluster, refused, walk.nearest)
    fits = sorted(walk.fits, key=lambda candidate: _rank(candidate, constraints.goal, walk.best))
    return SearchResult(fits[0], tuple(fits), tuple(refused), precision_because, walk.unpriced)


def _per_second(context: Context, goal: str) -> float:
    """Return what the goal counts at least for a second per step, in the unit of `_goal_value`."""
    usd, kwh, _ = amounts(context.cluster, float(context.steps), busy=0.0)
    value = {"money": usd, "energy": kwh}.get(goal, math.nan)
    return value if math.isfinite(value) else 1.0


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

    On one cluster money is proportional to time, and energy nearly: where they are unknown, time ranks.
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
