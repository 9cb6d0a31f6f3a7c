"""The parts of a run's page: each a function from what is known of the run now to HTML. All words are escaped here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paceline.account.advice.advise import advice_on
from paceline.account.budget_left import SpentByTag, nobody
from paceline.history.goodput import goodput_of
from paceline.history.phases import starts_of
from paceline.history.records import Records, number, table, text
from paceline.observe.dash.draw.lanes import lanes_svg, nodes_html, worst_words
from paceline.observe.dash.draw.timeline import timeline_svg
from paceline.observe.dash.logs import TAIL_LINES, tail_of
from paceline.observe.dash.traced import traces_html
from paceline.observe.live.run import RUNNING, SILENT, LiveRun
from paceline.observe.live.series import StepValues
from paceline.observe.live.spent import WORDS, left_so_far, seconds_left, spent_so_far
from paceline.observe.logs.read import ranks_with_logs
from paceline.report.bound.from_records import bound_of
from paceline.report.bound.page import bound_html
from paceline.report.compare import (
    MEMORY,
    RUN_TIME,
    STEP_TIME,
    Basis,
    Promise,
    basis_of,
    memory_groups,
    promises_of,
    time_groups,
)
from paceline.report.drawn.figures import (
    curve_chart,
    figure,
    groups_chart,
    loss_chart,
    phases_chart,
    promise_card,
    speed_chart,
)
from paceline.report.drawn.markup import esc, listing, note_html, pill, shown, table_html
from paceline.report.format import utc
from paceline.report.series import Series, thin, trend
from paceline.spec.journal.kinds import DecisionRecord, EvaluationRecord, RunStarted, VerifyRecord
from paceline.spec.journal.watching import NodeSample
from paceline.units import format_count, format_loss, format_seconds, plural

POINTS = 500  # of a curve: the page is drawn again and again
STYLES = {RUNNING: "good", "complete": "good", "requeue": "warn", "stopped": "warn", "failed": "bad", SILENT: "warn"}
SEVERITY = {"critical": "bad", "error": "bad", "warning": "warn"}
MOST_ROWS = 60  # of a table: the newest; the report has all
MOST_LOGS = 24  # ranks that are offered by name


@dataclass(frozen=True)
class RunView:
    """A run as it was at one moment, for the parts of one drawing."""

    run: LiveRun
    now: float
    rank: int | None = None  # whose output is shown; None: the first one's
    name: str = ""  # of the run on this page
    form: str = ""  # the token of the page's forms, where it may ask a run for something
    others: SpentByTag = nobody  # what tells the spending of the runs that share its budgets

    @cached_property
    def records(self) -> Records:
        """The rare records, and the recent steps."""
        return self.run.records()

    @cached_property
    def reference(self) -> RunStarted:
        """The start whose forecast holds."""
        return self.run.reference

    @cached_property
    def basis(self) -> Basis:
        """The recent steps that medians are of."""
        return basis_of(self.records, self.reference)

    @cached_property
    def values(self) -> StepValues:
        """All steps that count."""
        return self.run.steps.taken()

    @cached_property
    def promises(self) -> dict[str, Promise]:
        """What was promised, by kind, with what is measured of it now."""
        done, planned = self.run.steps_done, self.run.steps_planned
        share = done / planned if planned else None
        nodes = self.records.of(NodeSample)
        found = promises_of(self.records, self.reference, self.basis, starts_of(self.records), share, nodes)
        return {promise.kind: promise for promise in found}

    def curve(self, name: str) -> Series:
        """Return a column over steps, thinned for drawing."""
        return thin(self.values.column("step"), self.values.column(name), POINTS)


def head(view: RunView) -> str:
    """Return what a run is, how far it has come, and how long it will take."""
    run, status = view.run, view.run.status(view.now)
    done, planned = run.steps_done, run.steps_planned
    left = seconds_left(run)
    steps = f"{done:,} of {plural(planned, 'step')}" if planned else plural(done, "step")
    words = [f"{steps} done"]
    if left is not None and status == RUNNING:
        words.append(f"{format_seconds(left)} left, until {utc(view.now + left)}")
    last = run.last_moment
    if status == SILENT and last is not None:
        words.append(f"no record for {format_seconds(max(0.0, view.now - last))}: it hangs, was killed, or waits")
    bar = ""
    if planned:
        bar = f'<progress aria-label="steps done" max="{planned}" value="{min(done, planned)}">{steps}</progress>'
    start = view.reference
    about = [start.plan_text, plural(start.world_size, "device") if start.world_size else "", start.host,
             text(run.run_dir)]  # fmt: skip
    trouble = f'<p class="note">The journal cannot be read: {esc(run.trouble)}</p>' if run.trouble else ""
    behind = '<p class="note">Reading the journal: what is shown grows.</p>' if run.is_behind else ""
    return (
        f'<p class="verdict">{pill(STYLES.get(status, "none"), status)} {esc(". ".join(words))}.</p>{bar}'
        f'<p class="meta">{esc(" · ".join(word for word in about if word))}</p>{trouble}{behind}{_ended(run)}'
    )


def _ended(run: LiveRun) -> str:
    error = run.end.error if run.end is not None else None
    if not error:
        return ""
    rows = listing((word, text(error.get(word))) for word in ("because", "try"))
    trace = text(error.get("traceback"))
    shown_trace = f'<pre tabindex="0">{esc(trace)}</pre>' if trace else ""
    return f'<div class="alert"><b>{esc(text(error.get("what")) or "The run failed")}</b>{rows}{shown_trace}</div>'


def alerts(view: RunView) -> str:
    """Return the alerts, those that fire first."""
    newest = list(view.run.alerts.values())[::-1]
    firing_first = sorted(newest, key=lambda alert: alert.state != "firing")
    rows = [
        (
            pill(SEVERITY.get(alert.severity, "none"), alert.severity),
            esc(alert.state),
            esc(alert.title) + note_html(shown(alert.evidence)),
            esc(alert.advice),
            esc(utc(alert.time).removesuffix(" UTC")),
        )
        for alert in firing_first[:MOST_ROWS]
    ]
    return table_html(("severity", "state", "what", "try", "time (UTC)"), rows)


def cards(view: RunView) -> str:
    """Return step time, memory and run time beside their promises."""
    titles = {STEP_TIME: "Step time now", MEMORY: "Memory", RUN_TIME: "Run time so far"}
    found = [promise_card(view.promises[kind], title) for kind, title in titles.items()]
    rate = number(float(np.nanmedian(rates))) if len(rates := _finite(view, "rate")) else None
    unit = text(view.reference.facts.get("unit")) or "items"
    forecast = number(view.reference.forecast.get("tokens_per_second"))
    words = "" if forecast is None else f"forecast {format_count(forecast)} {unit}/s"
    big = "unknown" if rate is None else f"{format_count(rate)} {unit}/s"
    found.append(f'<div class="card"><div class="top">Throughput now</div><div class="big">{esc(big)}</div>'
                 f'<div class="small">{esc(words)}</div></div>')  # fmt: skip
    return f'<div class="cards">{"".join(found)}</div>'


def _finite(view: RunView, name: str) -> npt.NDArray[np.float64]:
    column = view.values.column(name)[-50:]
    return column[np.isfinite(column)]


def verdict(view: RunView) -> str:
    """Return what bounds a step now: the run's own verdict where it has one on record."""
    found = view.run.bound
    if found is None:
        return bound_html(bound_of(view.records))
    style = "good" if found.healthy else "none"
    words = f'<p class="verdict">{pill(style, f"{found.bound}-bound")} {esc(found.because)}</p>'
    facts = [("shown by", "; ".join(found.evidence)), ("try", found.advice), ("which brings", found.promise)]
    shares = sorted(found.shares.items(), key=lambda pair: -pair[1])
    rows = [(esc(name), f"{share:.0%}") for name, share in shares]
    parts = table_html(("a step is decided by", "share"), rows, (1,))
    return words + listing(facts) + parts + note_html(f"after step {found.step}, of the {found.steps} steps before it")


def loss(view: RunView) -> str:
    """Return the losses."""
    evaluations = {each.step: each.loss for each in view.run.of(EvaluationRecord)}
    pairs = sorted((step, value) for step, value in evaluations.items() if step is not None and value is not None)
    held = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    x, y = view.values.column("step"), view.values.column("loss")
    by_frequency = number(view.reference.facts.get("unigram_loss"))
    chart = loss_chart(
        thin(x, y, POINTS), trend(x, y), thin(held[:, 0], held[:, 1], POINTS), by_frequency, view.run.restarts()
    )
    rows = [("last step", format_loss(view.run.steps.last("loss")) if len(y) else ""),
            ("held-out", f"{format_loss(pairs[-1][1])} after step {pairs[-1][0]:,}" if pairs else "")]  # fmt: skip
    bad = int((~np.isfinite(y)).sum())
    caption = f"{plural(bad, 'step')} without a finite loss; the curve leaves them out." if bad else ""
    return figure(chart, caption) + listing(rows)


def speed(view: RunView) -> str:
    """Return seconds per step with the forecast's interval."""
    totals = view.values.column("total")
    finite = totals[np.isfinite(totals)]
    p95 = float(np.percentile(finite, 95)) if len(finite) else None
    chart = speed_chart(view.curve("total"), view.promises[STEP_TIME], p95, view.run.restarts())
    return figure(chart, f"Shaded: the forecast's 80 % interval. {view.basis.words.capitalize()}." if chart else "")


def terms(view: RunView) -> str:
    """Return where a step's time goes, forecast and measured."""
    groups = time_groups(view.reference, view.basis.steps)
    words = f"Measured: {view.basis.words}."
    label = "Seconds per step by part, forecast and measured"
    return groups_chart(groups, view.promises[STEP_TIME], label, words, is_folded=True)


def memory(view: RunView) -> str:
    """Return memory by component, forecast and measured."""
    groups = memory_groups(view.records, view.reference)
    label, words = "Bytes per device by component, forecast and measured", "Measured after the first step, or the last."
    return groups_chart(groups, view.promises[MEMORY], label, words, is_folded=True)


def lanes(view: RunView) -> str:
    """Return the ranks that were the slowest."""
    return figure(lanes_svg(view.run), worst_words(view.run)) + nodes_html(view.run)


def phases(view: RunView) -> str:
    """Return where the wall time went."""
    return phases_chart(view.run.phases(), "All starts, from the first record to the last.")


def timeline(view: RunView) -> str:
    """Return starts and events on the axis of time."""
    return figure(timeline_svg(view.run), "Hover over a mark for what it is. Times count from the first record.")


def spent(view: RunView) -> str:
    """Return what a run has cost, beside the promise, and what is left of its budgets."""
    columns = {"so far": "spent", "promised so far": "promised_so_far", "at the end": "at_end", "promised": "promised"}
    rows = [
        (esc(WORDS[each.name]), *(esc(each.said(getattr(each, name))) for name in columns.values()))
        for each in spent_so_far(view.run)
    ]
    note = note_html("Estimates: devices times the time in which they were held, at the rates of the forecast.")
    budgets = listing((WORDS[each.name], each.text) for each in left_so_far(view.run, view.others))
    table = table_html(("", *columns), rows, range(1, len(columns) + 1)) if rows else ""
    return table + budgets + note if table or budgets else ""


def advice(view: RunView) -> str:
    """Return what would make the run cheaper, as far as its records tell so far: the largest saving first."""
    goodput = goodput_of(view.records, view.run.phases(), simulates=False)
    found = advice_on(view.records, view.reference, bound_of(view.records), goodput)
    rows = [(esc(each.text) + note_html(each.because), esc(each.try_), f"{each.saves:.0%}", esc(each.of), each.sure)
            for each in found]  # fmt: skip
    return table_html(("what", "try", "saves", "of its", "how sure"), rows, (2,))


def traces(view: RunView) -> str:
    """Return the traces that were taken, and what asks for one."""
    return traces_html(view.run, view.name, view.form)


def health(view: RunView) -> str:
    """Return the training's health: what was told, and the newest figures of each block."""
    sample = view.run.health
    if sample is None:
        return ""
    keys = ("step", "detector", "block", "value", "threshold", "advice")
    rows = [[esc(shown(each.get(key))) for key in keys] for each in reversed(view.run.told)]
    blocks = sample.values
    names = list(dict.fromkeys(name for values in blocks.values() for name in table(values)))
    body = [[esc(block), *(esc(shown(table(values).get(name))) for name in names)]
            for block, values in list(blocks.items())[:MOST_ROWS]]  # fmt: skip
    step = note_html(f"after step {shown(sample.step)}")
    found = table_html(("step", "detector", "block", "value", "threshold", "try"), rows, (0, 3, 4))
    return found + table_html(["block", *(name.replace("_", " ") for name in names)], body, range(1, 99)) + step


def optimisation(view: RunView) -> str:
    """Return the gradient norm and the learning rate."""
    found = ""
    for key, name in (("grad_norm", "global gradient norm"), ("lr", "learning rate")):
        chart = curve_chart(view.curve(key).points, name, view.run.restarts(), log=key == "grad_norm")
        found += figure(chart)
    return found


def decisions(view: RunView) -> str:
    """Return the newest automatic choices, and the proof."""
    kept = view.run.of(DecisionRecord)
    rows = [
        (
            esc(utc(each.time).removesuffix(" UTC")),
            esc(each.what),
            esc(shown(each.before) or "–"),
            esc(shown(each.after) or "–"),
            esc(each.because),
        )
        for each in reversed(kept[-MOST_ROWS:])
    ]
    proof = view.run.newest(VerifyRecord)
    words = listing([("proof", proof.text)]) if proof is not None else ""
    return words + table_html(("time (UTC)", "what", "from", "to", "because"), rows)


def faults(view: RunView) -> str:
    """Return the newest faults."""
    rows = [
        (
            esc(utc(each.time).removesuffix(" UTC")),
            str(each.attempt or ""),
            esc(each.what),
            esc(each.because),
            "" if each.rank is None else str(each.rank),
        )
        for each in reversed(view.run.faults()[-MOST_ROWS:])
    ]
    return table_html(("time (UTC)", "start", "what", "because", "rank"), rows, (1, 4))


def logs(view: RunView) -> str:
    """Return the end of what one rank printed, and links to the other ranks'."""
    ranks = ranks_with_logs(view.run.run_dir)
    if not ranks:
        return ""
    rank = view.rank if view.rank in ranks else ranks[0]
    try:
        tail = tail_of(view.run.run_dir, rank)
    except OSError as error:
        return note_html(f"the output of rank {rank} cannot be read: {error}")
    near = ranks[max(0, ranks.index(rank) - MOST_LOGS // 2) :][:MOST_LOGS]
    links = " ".join(
        f'<a href="?rank={each}#logs"{" aria-current=true" if each == rank else ""}>rank {each}</a>' for each in near
    )
    lines = "" if tail is None else "\n".join(tail.lines)
    cut = note_html(f"the last {TAIL_LINES} lines at most; `paceline logs` has all") if tail and tail.is_cut else ""
    return f'<nav class="ranks" aria-label="ranks">{links}</nav><pre tabindex="0">{esc(lines)}</pre>{cut}'


PagePart = Callable[[RunView], str]

# Name on the page -> title and part, in order. A part that says nothing is left out.
PARTS: dict[str, tuple[str, PagePart]] = {
    "head": ("", head),
    "alerts": ("Alerts", alerts),
    "cards": ("", cards),
    "loss": ("Loss", loss),
    "speed": ("Speed", speed),
    "verdict": ("What bounds a step", verdict),
    "spent": ("What it has cost", spent),
    "advice": ("What would make it cheaper", advice),
    "lanes": ("Ranks and nodes", lanes),
    "timeline": ("What happened when", timeline),
    "phases": ("Where the wall time went", phases),
    "terms": ("Where a step's time goes", terms),
    "memory": ("Memory", memory),
    "traces": ("Traces", traces),
    "health": ("Health of the training", health),
    "optimisation": ("Optimisation", optimisation),
    "faults": ("Faults", faults),
    "decisions": ("Decisions", decisions),
    "logs": ("Logs", logs),
}


def drawn(run: LiveRun, name: str, now: float | None = None, rank: int | None = None) -> str:
    """Return one part of a run's page as it is now."""
    return PARTS[name][1](RunView(run, time.time() if now is None else now, rank))
