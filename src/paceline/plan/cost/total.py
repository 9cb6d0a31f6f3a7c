"""The price of plans: terms summed, with intervals, money, energy and utilisation.

`step_seconds` and `peak_bytes` price a whole search: sums alone, a chunk of plans at a time. `price` prices one plan
with every term in words. All run the same functions, so that what is shown is what was ranked.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.plan.cost.axes import axis_columns, bubble_columns
from paceline.plan.cost.columns import Columns, Floats
from paceline.plan.cost.compute import compute_columns, fixed_column, launch_column, matrix_peak, optimizer_column
from paceline.plan.cost.constants import Constants
from paceline.plan.cost.inputs import Column, Context, Sheet, terms_of, total
from paceline.plan.cost.learnt import (
    TIME_ERROR,
    learnt_memory,
    learnt_memory_spread,
    learnt_time,
    learnt_time_spread,
    memory_spread,
)
from paceline.plan.cost.memory import memory_columns
from paceline.plan.cost.network import network_columns
from paceline.plan.cost.price import WAITING, bill, busy_share
from paceline.plan.cost.rates import weakest
from paceline.plan.forecast import Estimate, Forecast, Term
from paceline.plan.learn.process import Z80
from paceline.plan.plan import Plan
from paceline.task.profile import ModelProfile

NEGLIGIBLE = 0.05  # a term below this share of the sum does not decide how the sum is known
CHUNK = 8192  # plans priced at once: what a processor's cache holds


def forecast_plan(
    profile: ModelProfile,
    cluster: Cluster,
    plan: Plan,
    *,
    batch_samples: int,
    steps: int,
    optimizer: str = "adamw",
) -> Forecast:
    """Return what the plan will take for `steps` steps of `batch_samples` samples. Values are NaN where unknown."""
    return price(Context(profile, cluster, batch_samples, steps, optimizer), plan)


def forward_backward_columns(sheet: Sheet) -> tuple[list[Column], list[Column]]:
    """Return what forward and backward compute, launches that this does not hide included, and communicate inside."""
    compute, inside = compute_columns(sheet), axis_columns(sheet)
    busy = total([*compute, *(column for column in inside if column.name != "pipeline sends")])
    return [*compute, launch_column(sheet, busy)], inside


def time_columns(sheet: Sheet) -> list[Column]:
    """Return the seconds per step of plans, by component."""
    compute, inside = forward_backward_columns(sheet)
    bubble = bubble_columns(sheet, compute, inside)
    network = network_columns(sheet, total(compute))
    formulas = [*compute, *inside, *bubble, *network, optimizer_column(sheet), fixed_column(sheet)]
    return [*formulas, *learnt_time(sheet, formulas)]


def held_columns(sheet: Sheet) -> list[Column]:
    """Return the bytes on every plan's fullest device, by component."""
    formulas = memory_columns(sheet)
    return [*formulas, *learnt_memory(sheet, formulas)]


def chunks_of(context: Context, columns: Columns) -> list[Sheet]:
    """Return sheets of a few thousand plans each."""
    return [Sheet(context, columns.take(slice(at, at + CHUNK))) for at in range(0, len(columns), CHUNK)]


def peak_bytes(context: Context, columns: Columns) -> Floats:
    """Return the bytes on every plan's fullest device."""
    return np.concatenate([np.zeros(0), *(total(held_columns(sheet)) for sheet in chunks_of(context, columns))])


def highest_bytes(context: Context, columns: Columns, peaks: Floats) -> Floats:
    """Return the high ends of the 80 % intervals of every plan's memory."""
    if context.learnt is None:
        return most_bytes(peaks, context.constants)
    ratios = [np.exp(Z80 * _memory_spread(sheet)) for sheet in chunks_of(context, columns)]
    return peaks * np.concatenate([np.ones(0), *ratios])


def _memory_spread(sheet: Sheet) -> Floats:
    learnt = learnt_memory_spread(sheet)
    return memory_spread(sheet) if learnt is None else learnt


def step_seconds(context: Context, columns: Columns) -> tuple[Floats, Floats]:
    """Return the seconds per step of every plan, and the part of them in which its devices compute."""
    seconds, waiting = [np.zeros(0)], [np.zeros(0)]
    for sheet in chunks_of(context, columns):
        time = time_columns(sheet)
        seconds.append(total(time))
        waiting.append(total([column for column in time if any(word in column.name for word in WAITING)]))
    whole = np.concatenate(seconds)
    return whole, 1 - np.concatenate(waiting) / whole


def price(context: Context, plan: Plan) -> Forecast:
    """Return what a plan will take, from a context that many plans share."""
    return _forecasts(context.sheet(plan))[0]


def price_all(context: Context, columns: Columns) -> list[Forecast]:
    """Return what plans will take, every term in words."""
    return _forecasts(Sheet(context, columns))


def memory_of(context: Context, plan: Plan) -> tuple[tuple[Term, ...], Estimate]:
    """Return the bytes on a plan's fullest device, by component and in all."""
    sheet = context.sheet(plan)
    terms = terms_of(held_columns(sheet), 0)
    return terms, memory_estimate(terms, float(_memory_spread(sheet)[0]))


def _forecasts(sheet: Sheet) -> list[Forecast]:
    time, memory = time_columns(sheet), held_columns(sheet)
    known, held = learnt_time_spread(sheet, time), _memory_spread(sheet)
    found = []
    for i in range(len(sheet.columns)):
        terms = terms_of(time, i)
        step = time_estimate(terms, sheet.rates.relative_spread, None if known is None else float(known[i]))
        listed = terms_of(memory, i)
        found.append(_forecast(sheet, terms, step, listed, memory_estimate(listed, float(held[i]))))
    return found


def _forecast(
    sheet: Sheet, time: tuple[Term, ...], step: Estimate, memory: tuple[Term, ...], held: Estimate
) -> Forecast:
    context = sheet.context
    run = _scaled(step, context.steps)
    flops = 3 * context.profile.forward_flops * context.batch_samples
    peak, _ = matrix_peak(context, sheet.columns.precision)
    paid = bill(context.cluster, run, busy_share(time))
    usd, kwh, carbon = (Estimate(term.value, term.low, term.high, term.source) for term in paid)
    return Forecast(
        step_seconds=step,
        time=time,
        peak_bytes=held,
        memory=memory,
        tokens_per_second=context.batch_samples * context.profile.tokens_per_sample / step.value,
        steps=context.steps,
        run_seconds=run,
        usd=usd,
        kwh=kwh,
        carbon_g=carbon,
        model_flops_per_step=flops,
        mfu=flops / (step.value * context.cluster.devices * peak),
        bill=paid,
    )


def time_estimate(terms: tuple[Term, ...], relative_spread: float, learnt_spread: float | None = None) -> Estimate:
    """Return the sum of time terms with its interval.

    The half-width is the model's error, weighted by the terms' shares, joined in quadrature with the spread of the
    probe's repeats and sizes. The interval is symmetric in ratios: (value / (1 + r), value * (1 + r)). After learning
    from runs it is what their posterior leaves, `learnt_spread`, a standard deviation of the logarithm.
    """
    total = sum(term.value for term in terms)
    if not math.isfinite(total):
        return Estimate(math.nan, math.nan, math.nan, "unknown")
    error = sum(term.value * TIME_ERROR[term.source] for term in terms if term.value) / total
    ratio = 1 + math.hypot(error, relative_spread) if learnt_spread is None else math.exp(Z80 * learnt_spread)
    return Estimate(total, total / ratio, total * ratio, _source(terms, total))


def memory_estimate(terms: tuple[Term, ...], spread: float) -> Estimate:
    """Return the sum of memory terms with its interval; `spread` is the standard deviation of its logarithm."""
    total = sum(term.value for term in terms)
    ratio = math.exp(Z80 * spread)
    return Estimate(total, total / ratio, total * ratio, _source(terms, total))


def most_bytes(peaks: Floats, constants: Constants) -> Floats:
    """Return the high ends of the 80 % intervals of sums of memory."""
    return peaks * math.exp(constants.memory_80)


def _source(terms: tuple[Term, ...], total: float) -> str:
    return weakest(*(term.source for term in terms if term.value > NEGLIGIBLE * total), "measured")


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor, estimate.source)
