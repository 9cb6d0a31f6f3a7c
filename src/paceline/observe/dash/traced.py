"""Traces on the page: what was traced, and the button that asks a running job for one, where actions are allowed."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote

from paceline.lock import is_live
from paceline.observe.live.run import RUNNING, LiveRun
from paceline.report.drawn.markup import esc, note_html, table_html
from paceline.report.format import utc
from paceline.spec.journal.bound import TraceRecord
from paceline.spec.watch.traced import STEPS, TraceRequest, ask_for_trace, requested_trace, trace_under_way

MOST_STEPS = 20  # that the page asks for at once: each is megabytes of a rank
MOST_BYTES = 1000  # of a form
MOST_SHOWN = 8


def traces_html(run: LiveRun, name: str, form: str) -> str:
    """Return the newest traces of a run; with a button where `form`, the token of the page's forms, is given."""
    rows = [
        (f"{each.first} to {each.last}", "all" if each.ranks is None else ", ".join(map(str, each.ranks)),
         esc(each.by), esc(each.path), esc(utc(each.time).removesuffix(" UTC")))
        for each in reversed(run.of(TraceRecord)[-MOST_SHOWN:])
    ]  # fmt: skip
    table = table_html(("steps", "ranks", "asked by", "files", "time (UTC)"), rows)
    return _button(name, form) + _asked(run) + table if form and run.status() == RUNNING else table


def _button(name: str, form: str) -> str:
    return (
        f'<form method="post" action="/run/{esc(quote(name, safe=""))}/trace">'
        f'<input type="hidden" name="form" value="{esc(form)}">'
        f'<label>steps <input name="steps" type="number" min="1" max="{MOST_STEPS}" value="{STEPS}"></label> '
        "<button>trace the next steps</button></form>"
    )


def _asked(run: LiveRun) -> str:
    """Return that a trace is asked for and not yet on record."""
    asked = requested_trace(run.run_dir)
    done = run.newest(TraceRecord)
    if asked is None or (done is not None and (done.time or 0.0) * 1e9 > asked.number):
        return ""
    which = f"steps {asked.first} to {asked.last}" if asked.first is not None else f"the next {asked.last} steps"
    return note_html(f"a trace of {which} is asked for")


def ask_by_form(run: LiveRun, body: str, form: str) -> str:
    """Ask a run for a trace as a form says; return why it was not asked, or ""."""
    told = dict(parse_qsl(body))
    if told.get("form") != form:
        return "the form is of another page: load it again"
    steps = told.get("steps", "")
    if not (steps.isascii() and steps.isdigit() and 1 <= int(steps) <= MOST_STEPS):
        return f"steps are a number from 1 to {MOST_STEPS}"
    if not is_live(run.run_dir):
        return "nothing trains there: the run's lock is held by no process that lives"
    if (other := trace_under_way(run.run_dir)) is not None:
        return f"{other.text} is under way: one is taken at a time, ask again when it is there"
    try:
        ask_for_trace(run.run_dir, TraceRequest(last=int(steps), by="page"))
    except OSError as error:
        return f"the request cannot be written: {error}"
    return ""
