"""A run's events on the axis of time: starts as bars, and a row of marks for each kind of event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import svg
from paceline.observe.live.run import LiveRun
from paceline.report.charts import LEFT, RIGHT, WIDTH
from paceline.report.drawn.markup import shown
from paceline.report.scale import Scale, scale_for, ticks_of
from paceline.spec.journal.bound import TraceRecord
from paceline.spec.journal.kinds import (
    CheckpointRecord,
    DecisionRecord,
    EvaluationRecord,
    FaultRecord,
    RecoveryRecord,
)
from paceline.spec.journal.record import Record
from paceline.units import format_seconds

ROW, TOP = 24, 8
MARKS = 160  # columns of a row: events of one column are one mark
KINDS = {"faults": "fault", "recoveries": "recovery", "decisions": "decision", "evaluations": "evaluation",
         "checkpoints": "checkpoint"}  # fmt: skip
STATUS = {"complete": "f-good", "failed": "f-bad"}


@dataclass(frozen=True)
class RunEvent:
    """Something that happened: when, in seconds since the epoch, and what is said of it."""

    time: float
    words: str


def events_of(run: LiveRun) -> dict[str, list[RunEvent]]:
    """Return what happened to a run, by kind: the newest of each."""
    rows: dict[str, list[RunEvent]] = {
        "faults": [_event(each, f"{each.what}: {each.because}") for each in run.of(FaultRecord)],
        "recoveries": [_event(each, f"{each.rung}: {each.because}") for each in run.of(RecoveryRecord)],
        "alerts": [_event(each, f"{each.state}: {each.title}") for each in run.alerted],
        "decisions": [_event(each, f"{each.what}: {shown(each.after)}") for each in run.of(DecisionRecord)],
        "evaluations": [_event(each, f"step {each.step}, loss {each.loss}") for each in run.of(EvaluationRecord)],
        "checkpoints": [_event(each, f"step {each.step}") for each in run.of(CheckpointRecord)],
        "traces": [_event(each, f"steps {each.first} to {each.last}: {each.path}") for each in run.of(TraceRecord)],
    }
    return {name: sorted((each for each in found if each.time), key=lambda each: each.time)
            for name, found in rows.items() if found}  # fmt: skip


def _event(record: Record, words: str) -> RunEvent:
    return RunEvent(record.time or 0.0, words)


def timeline_svg(run: LiveRun) -> str:
    """Return the picture; nothing for a run without a record."""
    spans = dict(sorted(run.spans.items()))
    if not spans:
        return ""
    began, ended = min(first for first, _ in spans.values()), max(last for _, last in spans.values())
    x = scale_for([0.0, max(1.0, ended - began)], LEFT + 30, WIDTH - RIGHT + 60, pad=0.0)
    rows = events_of(run)
    height = TOP + ROW * (1 + len(rows)) + 30
    bottom = float(height - 26)
    parts = []
    for tick in ticks_of(x, 6):
        parts.append(svg.rule(x(tick), float(TOP), x(tick), bottom, "grid"))
        parts.append(svg.text(x(tick), bottom + 17, format_seconds(tick) if tick else "0", "tick", "middle"))
    parts.append(svg.text(LEFT + 22, TOP + 15, "starts", "label", "end"))
    for attempt, (first, last) in spans.items():
        end = run.ends.get(attempt)
        style = STATUS.get(end.status if end else "", "f-none")
        words = f"start {attempt}: {format_seconds(last - first)}, {end.status if end else 'no end on record'}"
        left = x(first - began)
        parts.append(svg.box(left, float(TOP + 4), max(2.0, x(last - began) - left), 14.0, style, words))
    for index, (name, events) in enumerate(rows.items(), start=1):
        top = float(TOP + ROW * index)
        count = run.counts[KINDS[name]] if name in KINDS else len(events)
        parts.append(svg.text(LEFT + 22, top + 15, name, "label", "end"))
        parts.append(svg.rule(x.start, top + 11, x.end, top + 11, "grid"))
        parts += _marks(events, began, x, top, f"fill c{(index - 1) % 8}" if name != "faults" else "f-bad")
        parts.append(svg.text(x.end + 8, top + 15, f"{count:,}", "tick"))
    said = ", ".join(f"{len(events)} {name}" for name, events in rows.items())
    return svg.picture(WIDTH, height, f"Starts and events over time: {said}", parts, name="chart", alone=False)


def _marks(events: Sequence[RunEvent], began: float, x: Scale, top: float, style: str) -> list[str]:
    columns: dict[int, list[RunEvent]] = {}
    width = (x.end - x.start) / MARKS
    for event in events:
        columns.setdefault(int((x(event.time - began) - x.start) / width), []).append(event)
    found = []
    for column, own in columns.items():
        words = [f"{format_seconds(max(0.0, each.time - began))}  {each.words}" for each in own[:6]]
        words += [f"and {len(own) - 6} more"] if len(own) > 6 else []
        found.append(svg.box(x.start + column * width - 1, top + 4, 5.0, 14.0, style, "\n".join(words), rx=2))
    return found
