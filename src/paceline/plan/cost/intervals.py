"""How far off a forecast may be: 80 % and 95 % intervals of terms and of their sums.

Intervals are symmetric in ratios, (value / ratio, value x ratio): half-widths are logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.plan.cost.bill import QUANTILES
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import Component, total
from paceline.plan.cost.constants import Constants
from paceline.plan.cost.rates import Rates, weakest
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.unknown import Widths, time_widths
from paceline.spec.cluster import SOURCES, Cluster
from paceline.spec.forecast import Z80, Z95, Estimate, Term

# Relative half-width of the 80 % interval that the model itself earns, by how its figures are known.
TIME_ERROR = {"measured": 0.20, "published": 0.35, "assumed": 0.60, "unknown": math.nan}
CPU_MEMORY_ERROR = 0.15  # bytes are counted, not timed: what is missed is allocation, rounding and libraries
NEGLIGIBLE = 0.05  # a term below this share of the sum does not decide how the sum is known


def published_widths(sheet: Sheet) -> Widths:
    """Return how wide the intervals of step times on the sheet's published device are, and why."""
    context = sheet.context
    cluster, program = context.cluster, "" if context.software.guessed else context.software.name
    device, precision = cluster.device, sheet.columns.precision
    return time_widths(context.constants, device.name, precision, program, cluster.devices, device.assumed_rates)


def time_estimate(
    terms: tuple[Term, ...], rates: Rates, widths: Widths, learnt_spread: float | None = None
) -> Estimate:
    """Return the sum of time terms with its intervals.

    Of a published device they have these `widths`, those that left-out tables and what is unknown give. Of a probed
    one, the half-width is the model's error, weighted by the terms' shares, joined in quadrature with the spread of the
    probe's repeats and sizes. After learning from runs it is what their posterior leaves, `learnt_spread`, a standard
    deviation of the logarithm.
    """
    total = sum(term.value for term in terms)
    if not math.isfinite(total):
        return Estimate(math.nan, math.nan, math.nan, "unknown")
    source = source_of(terms, total)
    if learnt_spread is not None:
        return around(total, Z80 * learnt_spread, Z95 * learnt_spread, source)
    if rates.is_published:
        return around(total, widths.narrow, widths.wide, source)
    error = sum(term.value * TIME_ERROR[term.source] for term in terms if term.value) / total
    width = math.log(1 + math.hypot(error, rates.relative_spread))
    return around(total, width, width * QUANTILES, source)


def time_spread(sheet: Sheet, formulas: Sequence[Component]) -> Floats:
    """Return the standard deviation of log(measured / forecast) that every plan's unlearnt step time states."""
    rates = sheet.rates
    if rates.is_published:
        return np.full(len(sheet.columns), published_widths(sheet).narrow / Z80)
    by_source = np.array([TIME_ERROR[source] for source in SOURCES])
    errors = [np.where(column.values == 0, 0.0, column.values * by_source[column.known]) for column in formulas]
    error = np.sum(errors, axis=0) / total(formulas)
    spread: Floats = np.log1p(np.hypot(error, rates.relative_spread)) / Z80
    return spread


def memory_estimate(
    terms: tuple[Term, ...], cluster: Cluster, constants: Constants, learnt_spread: float | None = None
) -> Estimate:
    """Return the sum of memory terms with its intervals, those that learning from runs leaves where there was any."""
    total = sum(term.value for term in terms)
    widths = memory_widths(cluster, constants)
    if learnt_spread is not None:
        widths = Z80 * learnt_spread, Z95 * learnt_spread
    return around(total, *widths, source_of(terms, total))


def memory_widths(cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Return the half-widths of memory's 80 % and 95 % intervals as logarithms: of accelerators, as calibrated."""
    if cluster.device.kind == "cpu":
        width = math.log(1 + CPU_MEMORY_ERROR)
        return width, width * QUANTILES
    return constants.memory_80, constants.memory_95


def memory_spread(sheet: Sheet) -> Floats:
    """Return the standard deviation of log(measured / forecast) that every plan's unlearnt memory states."""
    return np.full(len(sheet.columns), memory_widths(sheet.context.cluster, sheet.context.constants)[0] / Z80)


def with_intervals(terms: tuple[Term, ...], width80: float | None, width95: float | None) -> tuple[Term, ...]:
    """Return terms with intervals: of these half-widths as logarithms, or of those by how each term is known."""
    found = []
    for term in terms:
        narrow = math.log(1 + TIME_ERROR[term.source]) if width80 is None else width80
        sure = around(term.value, narrow, narrow * QUANTILES if width95 is None else width95, term.source)
        found.append(replace(term, low=sure.low, high=sure.high, low95=sure.low95, high95=sure.high95))
    return tuple(found)


def around(value: float, width80: float, width95: float, source: str) -> Estimate:
    """Return a value with intervals of these half-widths as logarithms; what runs saved is negative."""
    if value < 0:
        width80, width95 = -width80, -width95
    narrow, wide = math.exp(width80), math.exp(width95)
    return Estimate(value, value / narrow, value * narrow, source, value / wide, value * wide)


def source_of(terms: tuple[Term, ...], total: float) -> str:
    """Return how a sum is known: as its weakest term that is not negligible."""
    return weakest(*(term.source for term in terms if term.value > NEGLIGIBLE * total), "measured")
