"""The price of plans: terms summed, with intervals, money, energy and utilisation.

`step_seconds` and `needed_bytes` price a whole search: sums alone, a chunk of plans at a time. `price` prices one plan
with every term in words. All run the same functions, so that what is shown is what was ranked.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.plan.cost.bill import WAITING, bill, busy_share
from paceline.plan.cost.columns import Columns, Floats
from paceline.plan.cost.components import Component, only, terms_of, total, without
from paceline.plan.cost.intervals import (
    memory_estimate,
    memory_widths,
    probed_intervals,
    published_widths,
    time_estimate,
    with_intervals,
)
from paceline.plan.cost.memory.offload import offload_components
from paceline.plan.cost.memory.peak_memory import memory_components
from paceline.plan.cost.memory.staged import staged_components
from paceline.plan.cost.memory.usable import flush_components, needed
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.cost.software import PACELINE, Software
from paceline.plan.cost.time.axes import axis_components, bubble_components
from paceline.plan.cost.time.compute import (
    compute_components,
    fixed_component,
    host_starts,
    launch_component,
    matrix_peak,
    optimizer_component,
)
from paceline.plan.cost.time.gathers import gather_components
from paceline.plan.cost.time.learnt import learnt_memory, learnt_memory_spread, learnt_time, learnt_time_spread
from paceline.plan.cost.time.network import network_components
from paceline.plan.cost.time.scoring import scoring_components
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
    return price(PricedTask(profile, cluster, batch_samples, steps, optimizer, software), plan)


def forward_backward_components(sheet: Sheet) -> tuple[list[Component], list[Component]]:
    """Return what forward and backward compute, launches that this does not hide included, and communicate inside."""
    compute, inside = compute_components(sheet), axis_components(sheet)
    busy = total([*compute, *without(inside, "sends")])
    return [*compute, launch_component(sheet, busy)], inside


def time_components(sheet: Sheet) -> list[Component]:
    """Return the seconds per step of plans, by component."""
    compute, inside = forward_backward_components(sheet)
    bubble = bubble_components(sheet, compute, inside)
    network = network_components(sheet, total(compute), total(without(compute, "host")))
    moved = offload_components(sheet, total(compute))
    update = [optimizer_component(sheet), *gather_components(sheet)]
    ends = [*scoring_components(sheet), *update, *moved, *flush_components(sheet), fixed_component(sheet)]
    formulas = [*compute, *inside, *bubble, *network, *ends]
    return [*formulas, *learnt_time(sheet, formulas)]


def held_components(sheet: Sheet) -> list[Component]:
    """Return the bytes on every plan's fullest device, by component."""
    formulas = memory_components(sheet)
    formulas += staged_components(sheet, formulas)
    return [*formulas, *learnt_memory(sheet, formulas)]


def chunks_of(context: PricedTask, columns: Columns) -> list[Sheet]:
    """Return sheets of a few thousand plans each."""
    return [Sheet(context, columns.take(slice(at, at + CHUNK))) for at in range(0, len(columns), CHUNK)]


def needed_bytes(context: PricedTask, columns: Columns) -> Floats:
    """Return the bytes that every plan's fullest device must have, without what its allocator would give back."""
    sheets = chunks_of(context, columns)
    return np.concatenate([np.zeros(0), *(needed(sheet, held_components(sheet)) for sheet in sheets)])


def step_seconds(context: PricedTask, columns: Columns) -> tuple[Floats, Floats]:
    """Return the seconds per step of every plan, and the part of them in which its devices compute."""
    seconds, waiting = [np.zeros(0)], [np.zeros(0)]
    for sheet in chunks_of(context, columns):
        time = time_components(sheet)
        seconds.append(total(time))
        waiting.append(total(only(time, *WAITING)))
    whole = np.concatenate(seconds)
    return whole, 1 - np.concatenate(waiting) / whole


def price(context: PricedTask, plan: Plan) -> Forecast:
    """Return what a plan will take, from a context that many plans share."""
    return _forecasts(context.sheet(plan))[0]


def price_all(context: PricedTask, columns: Columns) -> list[tuple[Plan, Forecast]]:
    """Return plans in full and what they will take, every term in words; of no plans, nothing."""
    if not len(columns):
        return []
    sheet = Sheet(context, columns)
    return [(sheet.plan(i), forecast) for i, forecast in enumerate(_forecasts(sheet))]


def memory_of(context: PricedTask, plan: Plan) -> tuple[Term, ...]:
    """Return the bytes on a plan's fullest device, by component."""
    return terms_of(held_components(context.sheet(plan)), 0)


def _forecasts(sheet: Sheet) -> list[Forecast]:
    time, memory = time_components(sheet), held_components(sheet)
    spreads = learnt_time_spread(sheet, time), learnt_memory_spread(sheet)
    return [
        _forecast(sheet, i, terms_of(time, i), terms_of(memory, i), *(_at(spread, i) for spread in spreads))
        for i in range(len(sheet.columns))
    ]


def _at(spread: Floats | None, index: int) -> float | None:
    return None if spread is None else float(spread[index])


def _forecast(
    sheet: Sheet,
    index: int,
    time: tuple[Term, ...],
    memory: tuple[Term, ...],
    time_spread: float | None,
    memory_spread: float | None,
) -> Forecast:
    context = sheet.context
    constants, rates = context.constants, sheet.rates
    widths = published_widths(sheet)
    starting = float(host_starts(sheet).seconds[index]) / sum(term.value for term in time)
    step = time_estimate(time, rates, widths, time_spread, starting)
    by_widths = (widths.narrow, widths.wide, widths.downwards)
    sure = with_intervals(time, *by_widths) if rates.by_shares else probed_intervals(time, rates)
    run = _scaled(step, context.steps)
    flops = _step_flops(sheet, index)
    peak, _ = matrix_peak(context, sheet.columns.precision)
    paid = bill(context.cluster, run, busy_share(time))
    usd, kwh, carbon = (
        Estimate(term.value, term.low, term.high, term.source, term.low95, term.high95) for term in paid
    )
    return Forecast(
        step_seconds=step,
        time=sure,
        peak_bytes=memory_estimate(memory, context.cluster, constants, memory_spread),
        memory=with_intervals(memory, *memory_widths(context.cluster, constants)),
        tokens_per_second=_items(sheet, index) / step.value,
        steps=context.steps,
        run_seconds=run,
        usd=usd,
        kwh=kwh,
        carbon_g=carbon,
        model_flops_per_step=flops,
        mfu=flops / (step.value * context.cluster.devices * peak),
        bill=paid,
    )


def _items(sheet: Sheet, index: int) -> float:
    """Return how many items a step of a plan has: tokens of samples as full as they come, or samples."""
    context = sheet.context
    full = float(sheet.fill_of_batch("tokens")[index]) if context.profile.tokens_per_sample > 1 else 1.0
    return context.batch_samples * context.profile.tokens_per_sample * full


def _step_flops(sheet: Sheet, index: int) -> float:
    """Return the FLOPs of a step of one of the plans: three forward passes, but for what frozen weights spare."""
    profile = sheet.context.profile
    tokens, pairs = (float(sheet.fill_of_batch(part)[index]) for part in ("tokens", "pairs"))
    products = 3 * sum(block.matmul_flops for block in profile.blocks) - profile.spared_flops
    attention = 3 * sum(block.attention_flops for block in profile.blocks)
    return (tokens * products + pairs * attention) * sheet.context.batch_samples


def most_bytes(context: PricedTask, bytes_needed: Floats) -> Floats:
    """Return the high ends of the 80 % intervals of sums of memory, learning aside."""
    return bytes_needed * math.exp(memory_widths(context.cluster, context.constants)[0])


def memory_widths_of(context: PricedTask, columns: Columns) -> tuple[Floats, Floats]:
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
