"""How far off a forecast may be: 80 % and 95 % intervals of terms and of their sums.

Half-widths are logarithms, so that intervals are (value / ratio, value x ratio). Those of published devices are wider
upwards than downwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from paceline.plan.cost import unknown
from paceline.plan.cost.bill import QUANTILES
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import Component, only, total
from paceline.plan.cost.constants import Constants
from paceline.plan.cost.rates import Rates, weakest
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.compute import host_starts
from paceline.plan.cost.unknown import Widths, time_widths
from paceline.spec.cluster import SOURCES, Cluster
from paceline.spec.forecast import Z80, Z95, Estimate, Kind, Term

# Relative half-width of the 80 % interval that the model itself earns, by how its figures are known.
TIME_ERROR = {"measured": 0.20, "published": 0.35, "assumed": 0.60, "unknown": math.nan}
# The same of a probed machine's measured terms: what five grids of layouts missed, of AMD and Intel machines, each with
# the formulas of its hour (benchmarks/grid/calibrate.py, 2026-11-29). Of a grid that is left out the others' intervals
# hold 75 to 85 %. Grids of before the afternoon of 2026-11-25 are not among them: their probes timed one thread by the
# processor's time, and took the faster of two passes for collectives too. All of them are of CPUs.
PROBED_ERROR = {"computing": 0.13, "communicating": 0.27}
PROBED_TAIL = 1.5  # half-widths of 95 % over those of 80 %, on those grids
ASSUMED = "assumed"  # what of a machine is not measured errs together: a core that is faster is so in everything
COMMUNICATING: tuple[Kind, ...] = ("collectives", "sends")
# What of a published device's step waits for links: what the data axes wait for too, that computing does not hide. In
# seven rounds of blind rows intervals held 97 % of those that wait less than half a per cent for it, and 60 % of those
# that wait more than a tenth (2026-11-28).
LINKED: tuple[Kind, ...] = (*COMMUNICATING, "sync")
LAUNCHED: tuple[Kind, ...] = ("host",)
CPU_MEMORY_ERROR = 0.15  # bytes are counted, not timed: what is missed is allocation, rounding and libraries
NEGLIGIBLE = 0.05  # a term below this share of the sum does not decide how the sum is known


def published_widths(sheet: Sheet) -> Widths:
    """Return how wide the intervals of step times on the sheet's published device are, and why, a step's parts aside.

    What a step's parts add is `Widths.of_step`.
    """
    context = sheet.context
    cluster, program = context.cluster, "" if context.software.guessed else context.software.name
    device, precision = cluster.device, sheet.columns.precision
    experts = bool((context.shapes["routed_elements"] > 0).any())
    return time_widths(
        context.constants, device.name, precision, program, cluster.devices, device.assumed_rates, experts=experts
    )


def time_estimate(
    terms: tuple[Term, ...], rates: Rates, widths: Widths, learnt_spread: float | None = None, starting: float = 0.0
) -> Estimate:
    """Return the sum of time terms with its intervals.

    Of a published device they have these `widths`, those that left-out tables and what is unknown give, with what is
    of the step: what it waits for, and what `starting` its operators takes the host, as a part of it. Of a probed
    one, the half-width joins in quadrature the model's errors of computing and of communicating and those of figures
    that nobody measured, each weighted by its part of the step, with the spread of a step's mean. After learning from
    runs it is what their posterior leaves, `learnt_spread`, a standard deviation of the logarithm.
    """
    total = sum(term.value for term in terms)
    if not math.isfinite(total):
        return Estimate(math.nan, math.nan, math.nan, "unknown")
    source = source_of(terms, total)
    if learnt_spread is not None:
        return around(total, Z80 * learnt_spread, Z95 * learnt_spread, source)
    if rates.by_shares:
        of_step = widths.of_step(*waiting_parts([(term.kind, term.value) for term in terms]), starting)
        return around(total, of_step.narrow, of_step.wide, source, of_step.downwards)
    errors = dict.fromkeys((*PROBED_ERROR, ASSUMED), 0.0)
    for term in terms:
        if term.value:
            what = _what(term.kind) if term.source == "measured" else ASSUMED
            errors[what] += term.value * probed_error(term.kind, term.source, rates)
    width = math.log(1 + math.hypot(*(error / total for error in errors.values()), rates.spread_of_step(total)))
    return around(total, width, width * PROBED_TAIL, source)


def waiting_parts(terms: Iterable[tuple[Kind, float]]) -> tuple[float, float]:
    """Return the parts of a step that wait for links, and for the host's launches, of terms' kinds and seconds."""
    listed = list(terms)
    whole = sum(seconds for _, seconds in listed)
    links = sum(seconds for kind, seconds in listed if kind in LINKED)
    launches = sum(seconds for kind, seconds in listed if kind in LAUNCHED)
    return (links / whole, launches / whole) if whole else (0.0, 0.0)


def probed_error(kind: Kind, source: str, rates: Rates) -> float:
    """Return the relative half-width of a term's 80 % interval on a probed machine.

    Where calibration steps of different sizes differ by more than the model's usual error, that is its error here.
    """
    if source != "measured":
        return TIME_ERROR[source]
    usual = usual_errors(rates)[_what(kind)]
    return usual if kind in COMMUNICATING else max(usual, rates.size_spread)


def usual_errors(rates: Rates) -> dict[str, float]:
    """Return the half-widths of a probed machine's measured terms by what they are.

    No grid of layouts has run on an accelerator, so there nothing measured is surer than `TIME_ERROR` has it.
    """
    least = 0.0 if rates.device.kind == "cpu" else TIME_ERROR["measured"]
    return {name: max(error, least) for name, error in PROBED_ERROR.items()}


def _what(kind: Kind) -> str:
    return "communicating" if kind in COMMUNICATING else "computing"


def time_spread(sheet: Sheet, formulas: Sequence[Component]) -> Floats:
    """Return the standard deviation of log(measured / forecast) that every plan's unlearnt step time states upwards."""
    rates = sheet.rates
    if rates.by_shares:
        base, all_of_it = published_widths(sheet).narrow, total(formulas)
        links, launches = (total(only(formulas, *kinds)) / all_of_it for kinds in (LINKED, LAUNCHED))
        starting = np.minimum(1.0, host_starts(sheet).seconds / all_of_it)
        more = np.hypot(unknown.COMMUNICATING * links, unknown.LAUNCHING * launches)
        found: Floats = np.hypot(base, np.hypot(more, unknown.STARTING * starting)) / Z80
        return found
    whole, errors = total(formulas), {name: np.zeros(len(sheet.columns)) for name in (*PROBED_ERROR, ASSUMED)}
    for column in formulas:
        by_source = np.array([probed_error(column.kind, source, rates) for source in SOURCES])
        missed = np.where(column.values == 0, 0.0, column.values * by_source[column.known])
        is_measured = np.broadcast_to(column.known, missed.shape) == SOURCES.index("measured")
        errors[_what(column.kind)] += np.where(is_measured, missed, 0.0)
        errors[ASSUMED] += np.where(is_measured, 0.0, missed)
    error = np.sqrt(sum((each / whole) ** 2 for each in errors.values()))
    spread: Floats = np.log1p(np.hypot(error, rates.spread_of(whole))) / Z80
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


def probed_intervals(terms: tuple[Term, ...], rates: Rates) -> tuple[Term, ...]:
    """Return a probed machine's terms of time with intervals, by what each is and how it is known."""
    found: list[Term] = []
    for term in terms:
        width = math.log(1 + probed_error(term.kind, term.source, rates))
        found += with_intervals((term,), width, width * PROBED_TAIL)
    return tuple(found)


def with_intervals(
    terms: tuple[Term, ...], width80: float, width95: float, below: tuple[float, float] | None = None
) -> tuple[Term, ...]:
    """Return terms with intervals of these half-widths as logarithms; `below` are those downwards, if they differ."""
    found = []
    for term in terms:
        sure = around(term.value, width80, width95, term.source, below)
        found.append(replace(term, low=sure.low, high=sure.high, low95=sure.low95, high95=sure.high95))
    return tuple(found)


def around(
    value: float, width80: float, width95: float, source: str, below: tuple[float, float] | None = None
) -> Estimate:
    """Return a value with intervals of these half-widths as logarithms; what runs saved is negative.

    `below` are the half-widths downwards, where they are others than those upwards.

    Example: 2 s with 0.4 upwards and 0.2 downwards is from 2 / e^0.2 = 1.64 to 2 e^0.4 = 2.98 s.
    """
    down, up = below or (width80, width95), (width80, width95)
    if value < 0:
        down, up = (-up[0], -up[1]), (-down[0], -down[1])
    (low, low95), (high, high95) = ([value * math.exp(sign * width) for width in widths] for sign, widths in
                                    ((-1, down), (1, up)))  # fmt: skip
    return Estimate(value, low, high, source, low95, high95)


def source_of(terms: tuple[Term, ...], total: float) -> str:
    """Return how a sum is known: as its weakest term that is not negligible."""
    return weakest(*(term.source for term in terms if term.value > NEGLIGIBLE * total), "measured")
