"""Search: price every plan that a task, a cluster and a spec's constraints allow, and rank those that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.cluster.cluster import Cluster
from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.total import price
from paceline.plan.forecast import Forecast
from paceline.plan.layout import Layout, accumulation_for, factorisations
from paceline.plan.plan import RECOMPUTE, Plan, PlanSpec
from paceline.plan.stages import pipeline_limits, with_pipeline
from paceline.task.profile import ModelProfile
from paceline.units import format_bytes, format_rate

HEADROOM = 0.05  # of a device's memory, kept free: allocator rounding, other processes, evaluation
TIE_RATIO = 1.02  # values this close to the best are a tie: forecasts cannot tell them apart
OPEN_AXES = ("dp_replicate", "dp_shard", "pp")
CLOSED_AXES = ("cp", "tp", "pp", "ep")  # to models whose profile says so


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and its price."""

    plan: Plan
    forecast: Forecast


@dataclass(frozen=True)
class Refusal:
    """A plan that was not taken, and why."""

    plan: Plan
    because: str


@dataclass(frozen=True)
class SearchResult:
    """The best plan, all that fit in order, all that were refused, and why the precision is what it is."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    precision_because: str


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
    refused = list(_closed(context, constraints, precision))
    fits: list[Candidate] = []
    nearest: tuple[float, Refusal] | None = None
    layouts = _layouts(cluster.devices, constraints)
    for plan in _plans(context, constraints, layouts, precision, refused):
        forecast = price(context, plan)
        because = memory_refusal(forecast, cluster)
        if not because:
            fits.append(Candidate(plan, forecast))
            continue
        refused.append(Refusal(plan, because))
        if nearest is None or forecast.peak_bytes.value < nearest[0]:
            nearest = (forecast.peak_bytes.value, refused[-1])
    if not fits:
        raise _nothing_fits(profile, cluster, refused, nearest[1] if nearest else None)
    best = min(_goal_value(candidate.forecast, constraints.goal) for candidate in fits)
    fits.sort(key=lambda candidate: _rank(candidate, constraints.goal, best))
    return SearchResult(fits[0], tuple(fits), tuple(refused), precision_because)


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


def memory_refusal(forecast: Forecast, cluster: Cluster) -> str:
    """Return why a plan's memory does not fit, in numbers; empty where it fits or the device's memory is unknown."""
    usable = cluster.device.memory_bytes.value * (1 - HEADROOM)
    if not forecast.peak_bytes.high > usable:
        return ""
    largest = sorted(forecast.memory, key=lambda term: -term.value)[:2]
    parts = ", ".join(f"{term.name} {format_bytes(term.value)}" for term in largest)
    return (
        f"needs up to {format_bytes(forecast.peak_bytes.high)} of {format_bytes(usable)} usable per device "
        f"({HEADROOM:.0%} headroom kept); {parts}"
    )


def _layouts(devices: int, constraints: PlanSpec) -> list[Layout]:
    """Return the layouts over the open axes that keep the constraints. Raises where there are none."""
    wanted = {axis: getattr(constraints, axis) for axis in OPEN_AXES}
    layouts = [
        layout
        for layout in factorisations(devices, OPEN_AXES)
        if all(not degree or getattr(layout, axis) == degree for axis, degree in wanted.items())
        and layout.pp == max(1, constraints.pp)  # a pipeline is built where it is asked for
    ]
    if not layouts:
        asked = " and ".join(f"plan.{axis} = {degree}" for axis, degree in wanted.items() if degree)
        product = math.prod(degree for degree in wanted.values() if degree)
        raise ConfigError(
            f"{asked} with {devices} device(s)",
            f"{' x '.join(OPEN_AXES)} must be the number of devices",
            f"cluster.devices = {product}" if product > 1 else "leave them unset: the planner chooses",
        )
    return layouts


def _closed(context: Context, constraints: PlanSpec, precision: str) -> Iterator[Refusal]:
    """Yield one refusal per axis that is closed to the model. Raises DoesNotFit where the spec demands one."""
    reasons = context.profile.closed_axes or {}
    devices = context.cluster.devices
    factor = next((n for n in range(2, devices + 1) if devices % n == 0), 2)
    for axis in CLOSED_AXES:
        if axis in OPEN_AXES and axis not in reasons:
            continue
        because = reasons.get(axis, "this version computes the data axes dp_replicate and dp_shard only")
        demanded = getattr(constraints, axis)
        if demanded > 1:
            raise DoesNotFit(
                f"plan.{axis} = {demanded} cannot be had", because, f"leave plan.{axis} unset, or use dp_shard"
            )
        if devices > 1:
            spread = {"dp_shard": factor, "ep": factor} if axis == "ep" else {axis: factor}
            rest = {} if axis == "ep" else {"dp_replicate": devices // factor}
            yield Refusal(Plan(Layout(**spread, **rest), precision=precision), because)


def _plans(
    context: Context, constraints: PlanSpec, layouts: list[Layout], precision: str, refused: list[Refusal]
) -> Iterator[Plan]:
    """Yield the plans to price; what is refused without a price goes to `refused`."""
    closed, batch = context.profile.closed_axes or {}, context.batch_samples
    modes = _recompute_modes(context, constraints)
    for layout in layouts:
        shown = Plan(layout, micro_batch=1, batch_samples=batch, precision=precision)
        axis = next((axis for axis in OPEN_AXES if getattr(layout, axis) > 1 and axis in closed), None)
        if axis:
            refused.append(Refusal(shown, closed[axis]))
            continue
        if layout.data_degree > batch:
            because = f"a global batch of {batch} sample(s) leaves some of {layout.data_degree} devices without any"
            refused.append(Refusal(shown, because))
            continue
        classes = (constraints.zero,) if constraints.zero else (1, 2, 3)
        for zero in classes if layout.dp_shard > 1 else (3,):
            for micro_batch in micro_batches(batch, layout.data_degree, constraints.micro_batch):
                accumulation = accumulation_for(batch, layout.data_degree, micro_batch)
                largest = -(-batch // layout.data_degree)
                plan = Plan(layout, zero, micro_batch, accumulation, batch, "none", precision, constraints.compile)
                plan = with_pipeline(plan, constraints, context.profile)
                accumulation = plan.accumulation
                if micro_batch > largest:
                    refused.append(Refusal(plan, f"a device's part of the batch is {largest} sample(s) at most"))
                elif accumulation > 1 and "accumulation" in closed:
                    refused.append(Refusal(plan, closed["accumulation"]))
                else:
                    for mode in modes:
                        chosen = replace(plan, recompute=mode)
                        limit = pipeline_limits(chosen, context.profile)
                        if limit:
                            refused.append(Refusal(chosen, limit))
                        else:
                            yield chosen


def micro_batches(batch_samples: int, data_degree: int, demanded: int = 0) -> tuple[int, ...]:
    """Return the micro-batches worth pricing: even parts of a device's share, powers of two, and the whole share."""
    if demanded:
        return (demanded,)
    largest = -(-batch_samples // data_degree)
    parts = {-(-largest // count) for count in range(1, 17)}
    powers = {2**exponent for exponent in range(largest.bit_length())}
    return tuple(sorted(parts | powers))


def _recompute_modes(context: Context, constraints: PlanSpec) -> tuple[str, ...]:
    if constraints.recompute == "auto":
        return RECOMPUTE if context.recomputable else ("none",)
    if constraints.recompute != "none" and not context.recomputable:
        raise ConfigError(
            f"plan.recompute = '{constraints.recompute}' with the model {context.profile.name}",
            "activation checkpointing works on repeated blocks, and none were found in this model",
            'recompute = "none", or hold the repeated layers in an nn.ModuleList',
        )
    return (constraints.recompute,)


def _goal_value(forecast: Forecast, goal: str) -> float:
    """Return what the goal minimises; infinity where it is unknown.

    On one cluster money and energy are proportional to time, so where they are unknown, time ranks the same.
    """
    asked = {"memory": forecast.peak_bytes, "money": forecast.usd, "energy": forecast.kwh}.get(goal)
    value = forecast.step_seconds.value if asked is None or not math.isfinite(asked.value) else asked.value
    return value if math.isfinite(value) else math.inf


def _rank(candidate: Candidate, goal: str, best: float) -> tuple[float, ...]:
    """Return the sort key: what is beyond a tie with the best, then fewer surprises.

    Surprises are, in falling weight: recompute, sharding classes that communicate more, memory.
    """
    forecast, plan = candidate.forecast, candidate.plan
    value = _goal_value(forecast, goal)
    beyond = 0.0 if not value > best * TIE_RATIO else value
    classes = plan.zero if plan.layout.dp_shard > 1 else 0
    return (beyond, RECOMPUTE.index(plan.recompute), classes, forecast.peak_bytes.value, value)


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
