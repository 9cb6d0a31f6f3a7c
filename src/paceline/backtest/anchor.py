"""Anchored forecasts: one row of a series is measured, the rest is forecast from it.

A series is what one source measured with one program and model on one chip in one precision. Its smallest row, the one
on the fewest devices and of those the one of the shortest sequence, says how far the formulas are off in what a device
computes; links, pipelines and the network stay as they were forecast. That is what three measured steps on one node say
of a thousand.

One factor for all that is computed: one row does not tell products from attention. A factor for every kind of term,
from how unsure each is taken to be, was tried and is no better (5.5 % in the median series, this one 5.4 %).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.backtest.score import SMALLEST_GROUP, Scored, grouped, timed
from paceline.backtest.statistics import mean, median, spearman
from paceline.plan.cost.bill import WAITING
from paceline.plan.cost.intervals import waiting_parts
from paceline.plan.cost.unknown import Widths
from paceline.spec.forecast import Z80

# How far rows of one series are off from each other, as the deviation of logarithms.
ROWS = 0.1


@dataclass(frozen=True)
class AnchoredSeries:
    """One series: its anchor, and what the forecasts of its other rows miss with it and without."""

    name: str
    devices: int  # of the anchor
    rows: int  # besides it
    factor: float  # measured over forecast of what its devices compute
    mape: float
    unanchored_mape: float
    spearman: float  # of all forecasts of the series, anchored
    regret: float  # of choosing the fastest by forecast among rows on as many devices, the worst


@dataclass(frozen=True)
class Anchored:
    """What anchoring gives over all series."""

    series: tuple[AnchoredSeries, ...]
    median_mape: float
    unanchored_median_mape: float
    median_spearman: float  # of series of at least three rows besides the anchor
    median_regret: float


def anchor_smallest(steps: Sequence[Scored]) -> Anchored:
    """Return the forecasts of series of at least three rows, anchored at the smallest row of each."""
    groups = grouped(timed(steps), _series_of)
    series = tuple(_anchored(items) for items in groups.values() if len(items) >= SMALLEST_GROUP)
    return Anchored(
        series,
        median_mape=median(one.mape for one in series),
        unanchored_median_mape=median(one.unanchored_mape for one in series),
        median_spearman=median(
            one.spearman for one in series if one.rows >= SMALLEST_GROUP and math.isfinite(one.spearman)
        ),
        median_regret=median(one.regret for one in series),
    )


def _series_of(item: Scored) -> tuple[object, ...]:
    row = item.case.row
    return (row.source, row.program, row.model, row.layers, row.hidden, row.accelerator, row.precision)


def _anchored(items: Sequence[Scored]) -> AnchoredSeries:
    ordered = sorted(items, key=_smallness)
    anchor, others = ordered[0], ordered[1:]
    factor = anchor_factor(anchor)
    forecasts = [anchored_seconds(item, factor) for item in others]
    measured = [item.case.step_seconds or math.nan for item in others]
    errors = [abs(forecast / real - 1) for forecast, real in zip(forecasts, measured, strict=True)]
    row = anchor.case.row
    return AnchoredSeries(
        name=f"{row.source}: {row.model}, {row.program}, {row.accelerator}, {row.precision}",
        devices=anchor.case.cluster.devices,
        rows=len(others),
        factor=factor,
        mape=mean(errors),
        unanchored_mape=mean(abs(item.time_error or 0.0) for item in others),
        spearman=spearman(forecasts, measured),
        regret=_regret(others, forecasts),
    )


def _smallness(item: Scored) -> tuple[int, int]:
    """Return what rows of a series are ordered by: what is tried first has few devices and short sequences."""
    return item.case.cluster.devices, item.case.row.seq_len or 0


def trust(item: Scored) -> float:
    """Return what part of an anchor's departure, as a logarithm, belongs to its series, the rest being its own.

    A forecast is as unsure as its interval says. What rows of a series have in common of that is how fast the chip
    computes under the program, and how fast its host starts operators. What links a step waits for, and what a row
    leaves open, is the row's own: other rows wait for other links. So an interval that is wider for the links that its
    step waits for trusts its anchor less, and one that is wider for a chip that nobody measured trusts it more.

    Example: of an 80 % interval of 0.19, a deviation of 0.148, it is 0.148^2 / (0.148^2 + 0.1^2) = 0.69; of a chip that
    nobody measured, 0.36, it is 0.89. Where 0.06 of the first is of a tenth of the step that waits for links, it is
    0.62.
    """
    seconds = item.priced.step_seconds
    links, _ = waiting_parts([(term.kind, term.seconds) for term in item.priced.terms])
    own = Widths(0.0, 0.0, "").of_step(links, 0.0, is_open=item.case.is_open).narrow
    series = max(0.0, math.log(seconds.high_80 / seconds.value) ** 2 - own**2) / Z80**2
    return series / (series + (own / Z80) ** 2 + ROWS**2)


def anchor_factor(item: Scored) -> float:
    """Return how much longer devices of a series compute than forecast, from an anchor whose waiting is as forecast.

    Of an anchor that mostly waits, of its whole step: what it waits for is then not known better.
    """
    measured, forecast = item.case.step_seconds or math.nan, item.priced.step_seconds.value
    waiting = _waiting(item)
    if waiting < forecast / 2 and measured > waiting:
        return float(((measured - waiting) / (forecast - waiting)) ** trust(item))
    return float((measured / forecast) ** trust(item))


def anchored_seconds(item: Scored, factor: float) -> float:
    """Return the seconds of a step whose computing takes `factor` times as long; bubbles are made of computing."""
    forecast, waiting = item.priced.step_seconds.value, _waiting(item)
    return (forecast - waiting) * factor + waiting


def _waiting(item: Scored) -> float:
    """Return the seconds of a step in which links are waited for."""
    return math.fsum(term.seconds for term in item.priced.terms if term.kind in WAITING and term.kind != "bubble")


def _regret(items: Sequence[Scored], forecasts: Sequence[float]) -> float:
    """Return how much slower the row forecast to be fastest was than the fastest, of rows of one job; the worst."""
    jobs = grouped(list(zip(items, forecasts, strict=True)), lambda pair: pair[0].case.group)
    found = [0.0]
    for pairs in jobs.values():
        measured = [item.case.step_seconds or math.nan for item, _ in pairs]
        chosen = min(range(len(pairs)), key=lambda place: pairs[place][1])
        found.append(measured[chosen] / min(measured) - 1)
    return max(found)


def anchored_lines(found: Anchored) -> list[str]:
    """Return what was found, for people."""
    lines = ["anchored at the smallest row of each series:"]
    lines += [
        f"  {one.name[:76]:76} from {one.devices:5,} devices: {one.rows:4} rows, MAPE {one.mape:6.1%} "
        f"({one.unanchored_mape:.1%} without), Spearman {one.spearman:.2f}, worst regret {one.regret:.1%}"
        for one in found.series
    ]
    return [
        *lines,
        f"  median series {found.median_mape:.1%} ({found.unanchored_median_mape:.1%} without), "
        f"Spearman {found.median_spearman:.2f}, regret {found.median_regret:.1%}, {len(found.series)} series",
    ]
