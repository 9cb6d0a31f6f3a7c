"""A step of a pipeline as trace events, which ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from paceline.plan.schedules.timeline import Timeline
from paceline.simulate.perfetto import complete_event, name_row, trace_document


def pipeline_trace(timeline: Timeline) -> str:
    """Return a pipeline's step: a row for each device, an event for each pass of a micro-batch through a stage."""
    events = [name_row("process_name", f"pipeline, {timeline.schedule}")]
    for rank, row in enumerate(timeline.rows):
        events.append(name_row("thread_name", f"device {rank}", tid=rank))
        for done in row:
            args = {"stage": done.stage, "micro_batch": done.micro}
            name = f"{done.kind}{done.micro} stage {done.stage}"
            events.append(complete_event(name, done.begin, done.end, rank, args))
    return trace_document(events)
