"""The price of plans: terms summed, with intervals, money, energy and utilisation.

`step_seconds` and `needed_bytes` price a whole search: sums alone, a chunk of plans at a time. `price` prices one plan
with every term in words. All run the same functions, so that what is shown is what was ranked.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.plan.cost.columns import Columns, Floats
from paceline.plan.cost.components import Column, only, terms_of, total, without
from paceline.plan.cost.inputs import Context, Sheet
from paceline.plan.cost.intervals import memory_estimate, memory_widths, time_estimate, with_intervals
from paceline.plan.cost.memory.held import memory_columns
from paceline.plan.cost.memory.offload import offload_columns
from paceline.plan.cost.memory.room import flush_columns, needed
from paceline.plan.cost.price import WAITING, bill, busy_share
from paceline.plan.cost.software import PACELINE, Software
from paceline.plan.cost.time.axes import axis_columns, bubble_columns
from paceline.plan.cost.time.compute import compute_columns, fixed_column, launch_column, matrix_peak, optimizer_column
from paceline.plan.cost.time.gathers import gather_columns
from paceline.plan.cost.time.learnt import learnt_memory, learnt_memory_spread, learnt_time, learnt_time_spread
from paceline.plan.cost.time.network import network_columns
from paceline.spec.cluster import Cluster
from paceline.spec.forecast import Z80, Z95, Estimate, Forecast, Term
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile

CHUNK = 8192  # plans priced at once: what a processor's cache holds


def forecast_plan(
    profile: ModelProfile,
    cluster: Cluster,
    plan: Plan,
    *,
    batch_samples: int,
    steps: int,
    optimizer: str = "adamw",
    software: Software = PACELINE,
) -> Forecast:
    """Return what the plan will take for `steps` steps of `batch_samples` samples. Values are NaN where unknown."""
    return price(Context(profile, cluster, batch_samples, steps, optimizer, software), plan)


def forward_backward_columns(sheet: Sheet) -> tuple[list[Column], list[Column]]:
    """Return what forward and backward compute, launches that this does not hide included, and communicate inside."""
    compute, inside = compute_columns(sheet), axis_columns(sheet)
    busy = total([*compute, *without(inside, "sends")])
    return [*compute, launch_column(sheet, busy)], inside


def time_columns(sheet: Sheet) -> list[Column]:
    """Return the seconds per step of plans, by component."""
    compute, inside = forward_backward_columns(sheet)
    bubble = bubble_columns(sheet, compute, inside)
    network = network_columns(sheet, total(compute))
    moved = offload_columns(sheet, total(compute))
    ends = [optimizer_column(sheet), *gather_columns(sheet), *moved, *flush_columns(sheet), fixed_column(sheet)]
    formulas = [*compute, *inside, *bubble, *network, *ends]
    return [*formulas, *learnt_time(sheet, formulas)]


def held_columns(sheet: Sheet) -> list[Column]:
    """Return the bytes on every plan's fullest device, by component."""
    formulas = memory_columns(sheet)
    return [*formulas, *learnt_memory(sheet, formulas)]


def chunks_of(context: Context, columns: Columns) -> list[Sheet]:
    """Return sheets of a few thousand plans each."""
    return [Sheet(context, columns.take(slice(at, at + CHUNK))) for at in range(0, len(columns), CHUNK)]


def needed_bytes(context: Context, columns: Columns) -> Floats:
    """Return the bytes that every plan's fullest device must have, without what its allocator would give back."""
    sheets = chunks_of(context, columns)
    return np.concatenate([np.zeros(0), *(needed(sheet, held_columns(sheet)) for sheet in sheets)])


def step_seconds(context: Context, columns: Columns) -> tuple[Floats, Floats]:
    """Return the seconds per step of every plan, and the part of them in which its devices compute."""
    seconds, waiting = [np.zeros(0)], [np.zeros(0)]
    for sheet in chunks_of(context, columns):
        time = time_columns(sheet)
        seconds.append(total(time))
        waiting.append(total(only(time, *WAITING)))
    whole = np.concatenate(seconds)
    return whole, 1 - np.concatenate(waiting) / whole


def price(context: Context, plan: Plan) -> Forecast:
    """Return what a plan will take, from a context that many plans share."""
    return _forecasts(context.sheet(plan))[0]


def price_all(context: Context, columns: Columns) -> list[tuple[Plan, Forecast]]:
    """Return plans in full and what they will take, every term in words."""
    sheet = Sheet(context, columns)
    return [(sheet.plan(i), forecast) for i, forecast in enumerate(_forecasts(sheet))]


def memory_of(context: Context, plan: Plan) -> tuple[Term, ...]:
    """Return the bytes on a plan's fullest device, by component."""
    return terms_of(held_columns(context.sheet(plan)), 0)


def _forecasts(sheet: Sheet) -> list[Forecast]:
    time, memory = time_columns(sheet), held_columns(sheet)
    spreads = learnt_time_spread(sheet, time), learnt_memory_spread(sheet)
    return [
        _forecast(sheet, terms_of(time, i), terms_of(memory, i), *(_at(spread, i) for spread in spreads))
        for i in range(len(sheet.columns))
    ]


def _at(spread: Floats | None, index: int) -> float | None:
    return None if spread is None else float(spread[index])


def _forecast(
    sheet: Sheet,
    time: tuple[Term, ...],
    memory: tuple[Term, ...],
    time_spread: float | None,
    memory_spread: float | None,
) -> Forecast:
    context = sheet.context
    constants, rates = context.constants, sheet.rates
    step = time_estimate(time, rates, time_spread)
    time = with_intervals(time, *((constants.time_80, constants.time_95) if rates.is_published else (None, None)))
    run = _scaled(step, context.steps)
    flops = 3 * context.profile.forward_flops * context.batch_samples
    peak, _ = matrix_peak(context, sheet.columns.precision)
    paid = bill(context.cluster, run, busy_share(time))
    usd, kwh, carbon = (
        Estimate(term.value, term.low, term.high, term.source, term.low95, term.high95) for term in paid
    )
    return Forecast(
        step_seconds=step,
        time=time,
        peak_bytes=memory_estimate(memory, context.cluster, constants, memory_spread),
        memory=with_intervals(memory, *memory_widths(context.cluster, constants)),
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


def most_bytes(context: Context, bytes_needed: Floats) -> Floats:
    """Return the high ends of the 80 % intervals of sums of memory, learning aside."""
    return bytes_needed * math.exp(memory_widths(context.cluster, context.constants)[0])


def memory_widths_of(context: Context, columns: Columns) -> tuple[Floats, Floats]:
    """Return the half-widths of the 80 % and 95 % intervals of every plan's memory, as logarithms."""
    spreads = [np.zeros(0)]
    if context.learnt is not None:
        found = [learnt_memory_spread(sheet) for sheet in chunks_of(context, columns)]
        spreads += [spread for spread in found if spread is not None]
    spread = np.concatenate(spreads)
    if len(spread) == len(columns):
        return Z80 * spread, Z95 * spread
    narrow, wide = memory_widths(context.cluster, context.constants)
    return np.full(len(columns), narrow), np.full(len(columns), wide)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    low95, high95 = estimate.low95 * factor, estimate.high95 * factor
    return Estimate(
        estimate.value * factor, estimate.low * factor, estimate.high * factor, estimate.source, low95, high95
    )
