"""Perfetto: runs as trace events, which ui.perfetto.dev and chrome://tracing show.

The format is Chrome's trace event format: complete events ("X") and instants ("i"), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict

from paceline.simulate.events import KINDS
from paceline.simulate.outcome import RunOutcome

MICROSECONDS = 1e6


class _Named(TypedDict):
    """What every event has; `args` is what the viewer shows of the event that is clicked on."""

    name: str
    ph: str
    pid: int
    tid: int
    args: Mapping[str, str | int]


class TraceEvent(_Named, total=False):
    """One event of the format: times in microseconds, and how far an instant reaches."""

    ts: float
    dur: float
    s: str


def run_trace(outcome: RunOutcome) -> str:
    """Return a simulated run that was recorded: one row for its states, one for what happened to nodes."""
    events = [name_row("process_name", "simulated run"), name_row("thread_name", "job", tid=0)]
    events.append(name_row("thread_name", "nodes", tid=1))
    for span in outcome.spans:
        events.append(
            complete_event(span.kind, span.begin, span.end, 0, {"note": span.note, "of": KINDS.index(span.kind)})
        )
    for instant in outcome.instants:
        args = {"component": instant.note}
        at = instant.at * MICROSECONDS
        events.append({"name": instant.name, "ph": "i", "ts": at, "pid": 0, "tid": 1, "s": "t", "args": args})
    return trace_document(events)


def name_row(kind: str, name: str, tid: int = 0) -> TraceEvent:
    """Return the event that names a process, or a row of it."""
    return {"name": kind, "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}


def complete_event(name: str, begin: float, end: float, tid: int, args: Mapping[str, str | int]) -> TraceEvent:
    """Return an event with a beginning and an end, in seconds, in one row."""
    ts, duration = begin * MICROSECONDS, (end - begin) * MICROSECONDS
    return {"name": name, "ph": "X", "ts": ts, "dur": duration, "pid": 0, "tid": tid, "args": args}


def trace_document(events: Sequence[TraceEvent]) -> str:
    """Return a whole file of events."""
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}) + "\n"
