"""A run's figures as HTML: loss, speed, memory, phases, promises; of a finished run's page and of the live page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.history.phases import Phase
from paceline.report.charts import Band, Line, interval_bar, line_chart, stacked_bars
from paceline.report.compare import Promise, TermGroup
from paceline.report.drawn.markup import esc, pill, tag
from paceline.report.format import quantity, signed_percent
from paceline.report.sections import VERDICTS, groups_table
from paceline.report.series import Series
from paceline.units import format_seconds

Markers = Sequence[tuple[float, str]]  # step, and what began there
CEILING = 1.15  # times the usual: a step beyond it is drawn at the edge


def figure(svg: str, caption: str = "", legend: str = "") -> str:
    """Return a picture with its legend and what is said of it; nothing for no picture."""
    words = f"<figcaption>{esc(caption)}</figcaption>" if caption else ""
    return f'<figure><div class="scroll">{svg}</div>{legend}{words}</figure>' if svg else ""


def legend(items: Sequence[tuple[str, str]]) -> str:
    """Return the colours' names and values, in the order in which a stacked bar counts its colours."""
    entries = "".join(
        f'<li><i class="c{index % 8}"></i>{esc(name)} <span>{esc(value)}</span></li>'
        for index, (name, value) in enumerate(items)
    )
    return f'<ul class="legend">{entries}</ul>'


def promise_card(promise: Promise, title: str) -> str:
    """Return a promise beside what was measured of it, with its interval as a bar."""
    style, word = VERDICTS[promise.verdict]
    show = partial(quantity, unit=promise.unit)
    bar = ""
    numbers = (promise.forecast, promise.low, promise.high, promise.measured)
    if promise.verdict != "unknown":
        forecast, low, high, measured = (value or 0.0 for value in numbers)
        bar = interval_bar(forecast, low, high, measured, show)
    against = (
        f"{signed_percent(promise.error)} against {show(promise.forecast)} forecast"
        if promise.error is not None
        else f"forecast {show(promise.forecast)}"
    )
    is_estimate = promise.measured is not None and promise.is_estimate
    estimated = " (estimate)" if is_estimate else ""
    return (
        f'<div class="card"><div class="top">{esc(title)}</div>'
        f'<div class="big">{esc(show(promise.measured))}</div>{pill(style, word)}{bar}'
        f'<div class="small">{esc(against)}{esc(estimated)} {tag(promise.source)}</div></div>'
    )


def loss_chart(
    training: Series, smooth: Series, held_out: Series, by_frequency: float | None = None, markers: Markers = ()
) -> str:
    """Return training and held-out losses over steps; with `smooth` means, single steps are faint.

    Of text, where a loss `by_frequency` is known, they are in nats. What another objective returns has its own unit.
    """
    is_smooth = bool(smooth.points)
    lines = [Line("" if is_smooth else "training", training.points, "faint" if is_smooth else "train")]
    if is_smooth:
        lines.append(Line("training", smooth.points, "train"))
    lines.append(Line("held-out", held_out.points, "held", dots=True))
    values = [value for line in lines for _, value in line.points]
    if not values:
        return ""
    return line_chart(
        lines,
        label="Training and held-out loss over steps",
        x_label="step",
        y_label="loss per item" if by_frequency is None else "loss, nats per item",
        reference=(by_frequency, "by frequency") if by_frequency is not None else None,
        markers=markers,
        log=min(values) > 0 and max(values) > 20 * min(values),
    )


def speed_chart(steps: Series, promise: Promise, p95_seconds: float | None, markers: Markers = ()) -> str:
    """Return seconds per step over steps, with the forecast's interval behind them."""
    if not steps.points:
        return ""
    band = None
    if promise.forecast is not None and promise.low is not None and promise.high is not None:
        band = Band(promise.low, promise.high, promise.forecast, "forecast")
    usual = max(p95_seconds or 0.0, band.high if band else 0.0)
    return line_chart(
        [Line("measured", steps.points)],
        label="Seconds per step, with the forecast's interval",
        x_label="step",
        y_label="seconds per step",
        tip_format=format_seconds,
        band=band,
        markers=markers,
        ceiling=usual * CEILING if usual else None,
    )


def curve_chart(points: Sequence[tuple[float, float]], name: str, markers: Markers = (), log: bool = False) -> str:
    """Return one curve over steps, low; by logarithm where that is wanted and all of it is positive."""
    if not points:
        return ""
    is_log = log and min(value for _, value in points) > 0
    return line_chart(
        [Line("", points)],
        label=f"{name} over steps",
        x_label="step",
        y_label=name,
        markers=markers,
        zero=not is_log,
        log=is_log,
        height=210,
    )


def groups_chart(groups: Sequence[TermGroup], total: Promise, label: str, note: str, is_folded: bool = False) -> str:
    """Return forecast over measured as stacked bars, and the table of terms below, which may be folded."""
    show = partial(quantity, unit=total.unit)
    names = [group.name for group in groups]
    sides = {
        "forecast": [(group.name, group.forecast or 0.0) for group in groups],
        "measured": [(group.name, group.measured or 0.0) for group in groups],
    }
    rows = [(side, values) for side, values in sides.items() if any(value for _, value in values)]
    if not rows:
        return ""
    chart = stacked_bars(rows, label=label, show=show, names=names)
    terms = groups_table(groups, total.unit, total)
    folded = f"<details><summary>Term by term</summary>{terms}</details>" if is_folded else terms
    return figure(chart, note, legend([(name, "") for name in names])) + folded


def phases_chart(phases: Sequence[Phase], words: str = "") -> str:
    """Return the wall time by phase as one bar, and its legend with seconds and shares."""
    total = sum(phase.seconds for phase in phases)
    if not total:
        return ""
    chart = stacked_bars(
        [("", [(phase.name, phase.seconds) for phase in phases])],
        label="Wall time by phase",
        show=format_seconds,
        names=[phase.name for phase in phases],
    )
    entries = [(each.name, f"{format_seconds(each.seconds)} · {each.seconds / total:.1%}") for each in phases]
    return figure(chart, words, legend(entries))
