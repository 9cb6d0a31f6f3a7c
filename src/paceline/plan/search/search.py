"""Search: price every plan that a task, a cluster and a spec's constraints allow, and rank those that fit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from paceline.errors import DoesNotFit
from paceline.plan.cost.columns import Columns, Floats, Ints
from paceline.plan.cost.intervals import time_spread
from paceline.plan.cost.memory.usable import usable_bytes
from paceline.plan.cost.pricing import memory_of, memory_widths_of, needed_bytes, time_components
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.cost.time.learnt import host_shares
from paceline.plan.feasible.refusals import refusal
from paceline.plan.learn.correct import Learnt
from paceline.plan.learn.task_measurement import TaskMeasurement
from paceline.plan.risk.chance import margin
from paceline.plan.search.found import Candidates, Refusals, SearchResult
from paceline.plan.search.limits import Limits
from paceline.plan.search.space import (
    BUDGETS,
    Refusal,
    Space,
    allowed_layouts,
    base_plan,
    recompute_modes,
)
from paceline.plan.search.uncut import in_one_piece
from paceline.plan.search.values import TIE_RATIO, Values, goal_values, values_of
from paceline.spec.cluster import Cluster
from paceline.spec.layout import DATA_AXES, MODEL_AXES
from paceline.spec.plan import FROZEN, OFFLOAD, PlanSpec
from paceline.spec.profile import TRY, ModelProfile
from paceline.units import format_durations, format_rate

LOW_GAIN = 1.05  # of a step: three digits of rounding are to buy more than a forecast can err in telling two apart
BUDGETED = 64  # of the best plans that recompute, on which memory budgets are tried


def search(
    profile: ModelProfile,
    cluster: Cluster,
    constraints: PlanSpec,
    *,
    batch_samples: int,
    steps: int,
    optimizer: str = "adamw",
    goodput: float = 1.0,
    coarse: bool = False,
    learnt: Learnt | None = None,
    measured: Mapping[str, TaskMeasurement] | None = None,
    scored: int = 0,
    stages: bool = False,
) -> SearchResult:
    """Return all plans of exactly `cluster.devices` devices that keep the constraints, ranked by `constraints.goal`.

    `goodput` is the part of the run's wall time in which it trains, for its deadline and budget; `coarse` leaves out
    micro-batches that are no powers of two. A model beside which another one only goes forward, or with weights in four
    bits, is searched twice: with these held as the trained ones, and spread over all data ranks; in a tie they are held
    as the trained ones. On a CPU a precision that is left to the planner is bf16 where the best plan gains by it, casts
    included, and not wherever products alone would. Raises DoesNotFit where none fits, with the one that came nearest,
    and ConfigError for constraints that contradict each other or the cluster.
    """
    search_once = functools.partial(
        _search, profile, cluster, batch_samples=batch_samples, steps=steps, optimizer=optimizer, goodput=goodput,
        coarse=coarse, learnt=learnt, measured=measured, scored=scored, stages=stages,
    )  # fmt: skip
    found = _frozen_best(search_once, profile, cluster, constraints)
    if constraints.precision != "auto" or cluster.device.kind != "cpu" or found.best.plan.precision == "fp32":
        return found
    try:
        wide = _frozen_best(search_once, profile, cluster, dataclasses.replace(constraints, precision="fp32"))
    except DoesNotFit:
        return found
    scores = goal_values(_values_of_best(found, wide), constraints.goal.weights)
    if scores[0] * LOW_GAIN < scores[1]:
        return found
    low, full = (each.best.forecast.step_seconds.value for each in (found, wide))
    because = "fp32: a step of the best plan in bf16 would take {} against {}".format(*format_durations(low, full))
    return dataclasses.replace(wide, precision_because=because)


def _frozen_best(
    search_once: Callable[[PlanSpec], SearchResult], profile: ModelProfile, cluster: Cluster, constraints: PlanSpec
) -> SearchResult:
    """Return the better of the searches that hold frozen models in each of the ways that there are."""
    tried: tuple[str, ...] = (constraints.frozen,)
    if constraints.frozen == "auto":
        some = profile.forward_only_parameters + profile.packed_parameters
        tried = FROZEN if some and cluster.devices > 1 else FROZEN[:1]
    found, refused = [], []
    for frozen in tried:
        try:
            found.append(search_once(dataclasses.replace(constraints, frozen=frozen)))
        except DoesNotFit as error:
            refused.append(error)
    if not found:
        raise min(refused, key=lambda error: error.least_bytes)
    if len(found) == 1:
        return found[0]
    as_model, spread = found
    scores = goal_values(_values_of_best(as_model, spread), constraints.goal.weights)
    return spread if scores[1] * TIE_RATIO < scores[0] else as_model


def _values_of_best(first: SearchResult, second: SearchResult) -> Values:
    """Return what the best plans of two searches take, as two rows."""
    return first.candidates.values.take([0]).joined(second.candidates.values.take([0]))


def _search(
    profile: ModelProfile,
    cluster: Cluster,
    constraints: PlanSpec,
    *,
    batch_samples: int,
    steps: int,
    optimizer: str,
    goodput: float,
    coarse: bool,
    learnt: Learnt | None,
    measured: Mapping[str, TaskMeasurement] | None,
    scored: int,
    stages: bool,
) -> SearchResult:
    """Return what `search` does, of plans that hold frozen models in one way."""
    context = PricedTask(
        profile, cluster, batch_samples, steps, optimizer, learnt=learnt, measured=measured or {}, scored=scored,
        stages=stages,
    )  # fmt: skip
    limits = Limits(constraints.deadline, constraints.budget_usd, steps, goodput)
    precision, precision_because = choose_precision(context, constraints.precision)
    base = base_plan(constraints, precision, batch_samples)
    modes = recompute_modes(context, constraints)
    weights, risk = constraints.goal.weights, constraints.memory_risk

    def sort_out(offload: str) -> tuple[Columns, Floats, Columns, list[Refusal]]:
        told: list[Refusal] = []
        started = dataclasses.replace(base, offload=offload)
        layouts = allowed_layouts(context, constraints, started, told)
        columns = Space(context, constraints, started, modes, told, coarse).columns(layouts)
        return (*_sort_out(context, columns, risk), told)

    fits, peaks, large, told = sort_out(base.offload)
    # Host memory is the last resort, the least of it first; on a CPU it is the device's own.
    for offload in OFFLOAD[1:] if constraints.offload == "auto" and cluster.device.kind != "cpu" else ():
        if not len(fits):
            fits, peaks, large, told = sort_out(offload)
    values = values_of(context, fits, peaks, usable_bytes(cluster))
    if len(fits) and constraints.recompute == "auto" and fits.recompute[np.argmin(goal_values(values, weights))]:
        fits, values = _with_budgets(context, weights, risk, fits, values)
    within = limits.keeps(values, cluster)
    scores = goal_values(values, weights)
    beyond = fits.take(np.flatnonzero(~within)[np.argsort(scores[~within], kind="stable")])
    refused = Refusals(tuple(told), context, large, beyond, limits, risk)
    if not within.any():
        raise _nothing_fits(profile, cluster, refused)
    fits, values = fits.take(within), values.take(within)
    scores = goal_values(values, weights)
    order = _order(fits, scores, values.memory)
    if learnt is None:
        order, kept_because = in_one_piece(context, fits, values, weights, order)
    else:
        order, kept_because = _kept(context, fits, values, weights, order)
    candidates = Candidates(context, fits.take(order), values.take(order), scores[order])
    return SearchResult(candidates[0], candidates, refused, precision_because, kept_because)


def _kept(
    context: PricedTask, fits: Columns, values: Values, weights: Mapping[str, float], order: Ints
) -> tuple[Ints, str]:
    """Return the places of plans with the formulas' choice first unless runs tell another from it, and why.

    A run teaches more of its own plan than of others: where the machine was slow for an hour, the plan that ran in it
    falls behind one that nobody has run. So another plan is taken where it is better by more than the standard
    deviation of what runs leave open between the two. Example: 7 % that one run moved them apart, with 11 % left open,
    change nothing; with both measured 4 % are left open, and they do.
    """
    assert context.learnt is not None
    unlearnt = dataclasses.replace(context, learnt=None)
    plain = values_of(unlearnt, fits, values.memory, usable_bytes(context.cluster))
    plain = dataclasses.replace(plain, risk=values.risk)
    by_formulas = _order(fits, goal_values(plain, weights), values.memory)
    simpler, _ = in_one_piece(unlearnt, fits, plain, weights, by_formulas)
    first, best = simpler[0], order[0]
    if first == best:
        return order, ""
    scores = goal_values(values, weights)
    gain = float(np.log(scores[first] / scores[best]))
    sheet = Sheet(context, fits.take([best, first]))
    terms = time_components(sheet)[:-1]
    noise = context.learnt.left_open(sheet.columns, time_spread(sheet, terms), host_shares(sheet, terms))
    if gain > noise:
        return in_one_piece(context, fits, values, weights, order)
    who, they = ("forecasts put", "runs here") if best == by_formulas[0] else ("runs here put", "they")
    because = (
        f"{who} {context.plan_of(fits, int(best))} before it by {np.expm1(max(0.0, gain)):.1%}, within the "
        f"{np.expm1(noise):.0%} that {they} leave open between the two"
    )
    return np.array([first, *order[order != first]]), because


def _sort_out(context: PricedTask, columns: Columns, risk: float) -> tuple[Columns, Floats, Columns]:
    """Return the plans that fit with the bytes they need, and those that do not, the smallest first."""
    peaks = needed_bytes(context, columns)
    too_large = peaks * np.exp(margin(risk, *memory_widths_of(context, columns))) > usable_bytes(context.cluster)
    left_out = np.flatnonzero(too_large)
    left_out = left_out[np.argsort(peaks[left_out], kind="stable")]
    return columns.take(~too_large), peaks[~too_large], columns.take(left_out)


def _with_budgets(
    context: PricedTask, weights: Mapping[str, float], risk: float, fits: Columns, values: Values
) -> tuple[Columns, Values]:
    """Return plans and values, joined by plans with a memory budget that beat all others beyond a tie.

    Where memory makes the best plan recompute, budgets are tried on the best plans that do.
    """
    scores = goal_values(values, weights)
    recomputing = np.flatnonzero(fits.recompute)
    nearest = recomputing[np.argsort(scores[recomputing], kind="stable")[:BUDGETED]]
    tried = fits.take(nearest).with_budgets(BUDGETS)
    allowed = [refusal(tried.plan(index), context.profile) is None for index in range(len(tried))]
    tried, held, _ = _sort_out(context, tried.take(np.array(allowed, dtype=bool)), risk)
    if not len(tried):
        return fits, values
    fits, values = fits.joined(tried), values.joined(values_of(context, tried, held, usable_bytes(context.cluster)))
    scores = goal_values(values, weights)
    keep = scores * TIE_RATIO < np.min(scores[: -len(tried)])
    keep[: -len(tried)] = True
    return fits.take(keep), values.take(keep)


def choose_precision(context: PricedTask, asked: str) -> tuple[str, str]:
    """Return the precision and the reason: the one asked for, or bf16 where the device computes faster in it."""
    if asked != "auto":
        return asked, f"{asked} as the spec asks"
    if context.cluster.device.kind == "cpu" and (blocks := context.profile.grouped):
        # Backward passes of depthwise convolutions of 16 to 64 channels took 1.3 to 6.4 times as long in bf16 (AMD
        # EPYC with AVX-512 BF16, torch 2.13), while products took less than half of the time.
        return "fp32", (
            f"fp32: bf16 was measured on products, and {blocks[0]} has convolutions in groups, which are slower in it "
            "on a CPU"
        )
    widest = max(context.profile.shapes, key=lambda block: block.matmul_flops, default=None)
    width = widest.matmul_width if widest and widest.matmul_flops else 256
    fp32, bf16 = (context.rates(precision).product_rate(width) for precision in ("fp32", "bf16"))
    device = context.cluster.device
    source = device.rate_source("bf16") if "bf16" in device.matmul_flops else device.matmul_source
    if math.isfinite(bf16) and not bf16 <= fp32:
        rates = f"{format_rate(bf16, 'FLOP')} against {format_rate(fp32, 'FLOP')} in fp32"
        return "bf16", f"bf16: {rates} at width {width} ({source})"
    if not math.isfinite(bf16):
        return "fp32", f"fp32: this device's bf16 rate is unknown ({source} figures)"
    return "fp32", f"fp32: bf16 is not faster here ({format_rate(bf16, 'FLOP')} at width {width}, {source})"


def _order(columns: Columns, value: Floats, peaks: Floats) -> Ints:
    """Return the places of plans, best first: what is beyond a tie with the best, then fewer surprises.

    Surprises are, in falling weight: axes that split the model or a sequence, recompute, sharding classes that
    communicate more, memory.
    """
    beyond = np.where(value > np.min(value) * TIE_RATIO, value, 0.0)
    axes = np.sum([getattr(columns, axis) > 1 for axis in MODEL_AXES], axis=0)
    classes = np.where(columns.state_degree > 1, columns.zero, 0)
    order: Ints = np.lexsort((value, peaks, classes, columns.recompute, axes, beyond))
    return order


def _nothing_fits(profile: ModelProfile, cluster: Cluster, refused: Refusals) -> DoesNotFit:
    what = f"{profile.name} does not fit {cluster.devices} x {cluster.device.name}"
    if len(refused.beyond):
        nearest = refused[len(refused.told)]
        what = f"{profile.name} on {cluster.devices} x {cluster.device.name} keeps no {refused.limits.names}"
        return DoesNotFit(what, f"the best plan, {nearest.plan}, {nearest.because}", refused.limits.fix(cluster))
    if not len(refused.too_large):
        closed = profile.closed_axes or {}
        # Of a model without any data axis that is the reason, and not the last of the axes that few models have.
        if cluster.devices > 1 and all(axis in closed for axis in DATA_AXES):
            what = f"{profile.name} cannot be trained on {cluster.devices} x {cluster.device.name}"
            because, _, opens = closed[DATA_AXES[0]].partition(TRY)
            return DoesNotFit(what, because, f"cluster.devices = 1{f', or {opens}' if opens else ''}")
        last = refused.told[-1].because if refused.told else "no layout is possible"
        return DoesNotFit(what, last, f"{'fewer devices, or ' * (cluster.devices > 1)}unset constraints of [plan]")
    nearest = refused[len(refused.told)]
    error = DoesNotFit(
        f"{what}: none of {len(refused):,} plans",
        f"the smallest, {nearest.plan}, {nearest.because}",
        "more devices, a smaller model or shorter samples, or unset constraints of [plan]",
    )
    error.least_bytes = sum(term.value for term in memory_of(refused.context, nearest.plan))
    return error
