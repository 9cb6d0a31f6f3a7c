"""A run's report as one self-contained HTML file: no script, no font and no picture from elsewhere."""

from __future__ import annotations

from paceline.account.advice.advise import advice_line
from paceline.history.goodput import goodput_text
from paceline.history.phases import BETWEEN, LOST, PAUSED
from paceline.plan.placement.draw import placement_svg
from paceline.plan.placement.place import placement_from_dict
from paceline.report import sections as part
from paceline.report.bound.page import bound_html
from paceline.report.compare import ENERGY, MEMORY, MONEY, RUN_TIME, STEP_TIME
from paceline.report.drawn.figures import (
    curve_chart,
    figure,
    groups_chart,
    loss_chart,
    phases_chart,
    promise_card,
    speed_chart,
)
from paceline.report.drawn.markup import esc, pill, section
from paceline.report.format import UNKNOWN, quantities, signed_percent, utc
from paceline.report.held_out.page import metrics_html
from paceline.report.held_out.written_texts import written_rows
from paceline.report.style import CSS
from paceline.report.summary import Summary
from paceline.units import format_count, format_loss, format_seconds

STATUS_STYLE = {"complete": "good", "requeue": "warn", "stopped": "warn", "failed": "bad"}
TITLES = {STEP_TIME: "Step time", MEMORY: "Memory", RUN_TIME: "Run time", MONEY: "Money",
          ENERGY: "Energy"}  # fmt: skip


def _verdict(summary: Summary) -> str:
    """Return the first sentence: did it finish, and were the promises kept."""
    judged = [summary.promise(kind) for kind in TITLES]
    known = [promise for promise in judged if promise.verdict != "unknown"]
    over = [promise for promise in known if promise.verdict == "above"]
    if not known:
        words = "There is nothing to hold against the forecast."
    elif not over:
        words = f"Every promise that could be checked was kept ({len(known)} of {len(judged)})."
    else:
        names = ", ".join(f"{promise.name} {signed_percent(promise.error)}" for promise in over)
        words = f"{len(known) - len(over)} of {len(known)} promises were kept; above the interval: {names}."
    words += _cost_of_interruptions(summary)
    return f'<p class="verdict">{esc(summary.status_text)} {esc(words)}</p>'


def _cost_of_interruptions(summary: Summary) -> str:
    rested = sum(phase.seconds for phase in summary.phases if phase.kind == PAUSED)
    told = f" Planned pauses took {format_seconds(rested)}." if rested >= 1 else ""
    parts = [phase for phase in summary.phases if phase.kind in (LOST, BETWEEN) and phase.seconds >= 1]
    if not parts:
        return told
    named = ", ".join(f"{phase.name} {format_seconds(phase.seconds)}" for phase in parts)
    return f" Interruptions cost {format_seconds(sum(phase.seconds for phase in parts))} ({named}).{told}"


def _cards(summary: Summary) -> str:
    cards = []
    for kind, title in TITLES.items():
        cards.append(promise_card(summary.promise(kind), title))
    judged = [promise for promise in summary.promises if promise.kind in TITLES]
    notes = "".join(f"<li>{esc(TITLES[promise.kind])}: {esc(promise.measured_how)}.</li>" for promise in judged)
    return (
        f'<div class="cards">{"".join(cards)}</div><details><summary>How each was measured</summary>'
        f'<ul class="note">{notes}</ul></details>'
    )


def _restarts(summary: Summary) -> list[tuple[float, str]]:
    first = summary.attempts[0].number if summary.attempts else 0
    return [
        (float(attempt.resumed_at_step), f"start {attempt.number}")
        for attempt in summary.attempts
        if attempt.resumed_at_step is not None and attempt.number > first and attempt.steps
    ]


def _loss(summary: Summary) -> str:
    curves, losses = summary.series, summary.losses
    if not curves["loss"].points and not curves["held_out"].points:
        return ""
    smooth = curves["loss_trend"]
    chart = loss_chart(curves["loss"], smooth, curves["held_out"], losses.unigram, _restarts(summary))
    how = " Faint: each step; strong: means over hundredths of the run." if smooth.points else ""
    rows = [
        ("training", f"{_number(losses.first)} first, {_number(losses.last)} last, "
                     f"{_number(losses.best)} best{_at(losses.best_step)}"),
        ("held-out", "" if losses.held_out_last is None else
         f"{_number(losses.held_out_first)} first, {_number(losses.held_out_last)} last, "
         f"{_number(losses.held_out_best)} best{_at(losses.held_out_best_step)}"),
        ("guessing by frequency", "" if losses.unigram is None else _number(losses.unigram)),
        ("seen", f"{format_count(summary.items_seen)} {summary.unit}" if summary.items_seen else ""),
        *part.sources(summary),
    ]  # fmt: skip
    return figure(chart, f"Loss of the steps that count.{how}") + part.listing(rows)


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else format_loss(value)


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step:,}"


def _speed(summary: Summary) -> str:
    points, speed = summary.series["step_seconds"], summary.speed
    if not points.points:
        return ""
    chart = speed_chart(points, summary.promise(STEP_TIME), speed.p95_seconds, _restarts(summary))
    unit = f"{summary.unit}/s"
    rates = [speed.items_per_second, speed.p5_items_per_second, speed.p95_items_per_second]
    middle, slow, fast = ("unknown" if rate is None else format_count(rate) for rate in rates)
    mfu = "unknown" if speed.mfu is None else f"{speed.mfu:.1%}"
    promised = "" if speed.mfu_forecast is None else f", forecast {speed.mfu_forecast:.1%}"
    rows = [
        ("step time", "{} median, {} to {} (5th to 95th percentile)".format(
            *quantities((speed.median_seconds, speed.p5_seconds, speed.p95_seconds), "s"))),
        ("throughput", f"{middle} {unit} median, {slow} to {fast}"),
        ("model FLOP utilisation", f"{mfu}{promised} ({speed.mfu_convention})"),
    ]  # fmt: skip
    caption = f"Shaded: the forecast's 80 % interval. {summary.basis.capitalize()}."
    return figure(chart, caption) + part.listing(rows) + part.slowest(summary)


def _optimisation(summary: Summary) -> str:
    """Return the gradient norm (by logarithm where it is positive throughout) and the learning rate."""
    figures = []
    for key, name in (("grad_norm", "global gradient norm"), ("lr", "learning rate")):
        points = summary.series[key].points
        figures.append(figure(curve_chart(points, name, _restarts(summary), log=key == "grad_norm")))
    return "".join(figures)


def _time_terms(summary: Summary) -> str:
    note = f"Measured: {summary.basis}; the medians of the parts need not add up to the median step."
    label = "Seconds per step by part, forecast and measured"
    return groups_chart(summary.time_groups, summary.promise(STEP_TIME), label, note)


def _memory(summary: Summary) -> str:
    note = "Components as measured after the first step, or the last; the total below is the highest peak on record."
    label = "Bytes per device by component, forecast and measured"
    return groups_chart(summary.memory_groups, summary.promise(MEMORY), label, note)


def _phases(summary: Summary) -> str:
    notes = "; ".join(f"{phase.name}: {phase.note}" for phase in summary.phases)
    return phases_chart(summary.phases, f"Goodput {goodput_text(summary.goodput)}. {notes[:1].upper()}{notes[1:]}.")


def _advice(summary: Summary) -> str:
    """Return what is left of budgets, and what would make the run cheaper."""
    rows = [(left.name.replace("_", " "), left.text) for left in summary.budgets]
    rows += [(advice.kind.replace("_", " "), f"{advice_line(advice)}. Because: {advice.because}")
             for advice in summary.advice]  # fmt: skip
    return part.listing(rows)


def _header(summary: Summary) -> str:
    status = pill(STATUS_STYLE.get(summary.status, "none"), summary.status)
    devices = f"{summary.world_size} device{'s' if summary.world_size != 1 else ''}" if summary.world_size else ""
    about = [summary.plan_text, devices, summary.reproduce.host, f"{utc(summary.started)} to {utc(summary.ended)}"]
    remarks = "".join(f'<p class="note">{esc(remark)}</p>' for remark in summary.remarks)
    announced = f"<pre>{esc(chr(10).join(summary.headline))}</pre>" if summary.headline else ""
    return (
        f'<header><div class="eyebrow">Paceline report {status}</div><h1>{esc(summary.name)}</h1>{_verdict(summary)}'
        f'<p class="meta">{esc(" · ".join(word for word in about if word))}</p></header>'
        f"{part.error_block(summary)}{_cards(summary)}{remarks}"
        f"{'<h3>As it was announced</h3>' + announced if announced else ''}"
    )


def _placement(summary: Summary) -> str:
    """Return the map of ranks to nodes, of runs on several devices."""
    try:
        found = placement_from_dict(summary.placement)
    except (KeyError, TypeError, ValueError):  # no record of it, or one of another version
        return ""
    return figure(placement_svg(found, alone=False)) if found.topology.devices > 1 else ""


def _traceback(summary: Summary) -> str:
    trace = (summary.error or {}).get("traceback")
    return f"<pre>{esc(trace)}</pre>" if trace else ""


def render_html(summary: Summary) -> str:
    """Return the whole report as one HTML document, below 2 MB whatever the length of the run."""
    body = "".join(
        [
            _header(summary),
            section("What failed first", _traceback(summary)),
            section("Loss", _loss(summary)),
            section("Metrics", metrics_html(summary.metrics, _restarts(summary))),
            section("Written by the model", part.listing(written_rows(summary.written))),
            section("Speed", _speed(summary)),
            section("What bounds a step", bound_html(summary.bound)),
            section("Nodes", part.listing([("seen", summary.nodes)]) if summary.nodes else ""),
            section("Health of training", part.listing([("told", line) for line in summary.health])),
            section("Where a step's time goes", _time_terms(summary)),
            section("Memory", _memory(summary)),
            section("Where the wall time went", _phases(summary)),
            section("Budgets and advice", _advice(summary)),
            section("Optimisation", _optimisation(summary)),
            section("Since the starting weights", part.moved(summary.moved)),
            section("Decisions", part.decisions(summary.decisions)),
            section("Verification", part.verification(summary.verification)),
            section("Starts, faults and checkpoints", part.starts(summary)),
            section("Placement", _placement(summary)),
            section("Cluster", part.cluster(summary.cluster)),
            section("Run it again", part.reproduce(summary)),
        ]
    )
    title = f"{summary.name}: {summary.status}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{esc(title)}</title><style>{CSS}</style></head><body><main>{body}"
        f"<footer>Made from the journal of {esc(summary.run_dir or 'the run')}. Hover over a chart for its values."
        "</footer></main></body></html>\n"
    )
