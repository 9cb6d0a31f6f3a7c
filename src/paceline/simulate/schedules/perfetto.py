"""Perfetto: runs and pipelines as trace events, which ui.perfetto.dev and chrome://tracing show.

The format is Chrome's trace event format: complete events ("X") and instants ("i"), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict

from paceline.simulate.events import KINDS
from paceline.simulate.outcome import RunOutcome
from paceline.simulate.schedules.timeline import Timeline

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
    events = [_name("process_name", "simulated run"), _name("thread_name", "job", tid=0)]
    events.append(_name("thread_name", "nodes", tid=1))
    for span in outcome.spans:
        events.append(_complete(span.kind, span.begin, span.end, 0, {"note": span.note, "of": KINDS.index(span.kind)}))
    for instant in outcome.instants:
        args = {"component": instant.note}
        at = instant.at * MICROSECONDS
        events.append({"name": instant.name, "ph": "i", "ts": at, "pid": 0, "tid": 1, "s": "t", "args": args})
    return _document(events)


def pipeline_trace(timeline: Timeline) -> str:
    """Return a pipeline's step: a row for each device, an event for each pass of a micro-batch through a stage."""
    events = [_name("process_name", f"pipeline, {timeline.schedule}")]
    for rank, row in enumerate(timeline.rows):
        events.append(_name("thread_name", f"device {rank}", tid=rank))
        for done in row:
            args = {"stage": done.stage, "micro_batch": done.micro}
            name = f"{done.kind}{done.micro} stage {done.stage}"
            events.append(_complete(name, done.begin, done.end, rank, args))
    return _document(events)


def _name(kind: str, name: str, tid: int = 0) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}


def _complete(name: str, begin: float, end: float, tid: int, args: Mapping[str, str | int]) -> TraceEvent:
    ts, duration = begin * MICROSECONDS, (end - begin) * MICROSECONDS
    return {"name": name, "ph": "X", "ts": ts, "dur": duration, "pid": 0, "tid": tid, "args": args}


def _document(events: Sequence[TraceEvent]) -> str:
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}) + "\n"
