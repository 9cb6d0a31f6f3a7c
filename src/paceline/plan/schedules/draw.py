"""Draw: steps of pipelines as SVG files that stand alone, without a script or an outside resource."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import svg
from paceline.plan.schedules.timeline import Timeline
from paceline.simulate.draw import LEFT, RIGHT, WIDTH, drawing
from paceline.units import format_durations, format_seconds

ROW, GAP = 26, 4
KINDS = (("F", "forward"), ("B", "backward"), ("W", "backward, weights"))


def timelines_svg(timelines: Sequence[Timeline]) -> str:
    """Return pipelines below each other on one scale of time: a row for each device, a box for each pass."""
    longest = max(timeline.seconds for timeline in timelines)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts, top = [], 8.0
    for timeline in timelines:
        title = f"{timeline.schedule}: {format_seconds(timeline.seconds)}, bubble {timeline.bubble:.1%}"
        parts.append(svg.text(LEFT, top + 12, title))
        top += 20
        for device, row in enumerate(timeline.rows):
            parts.append(svg.text(LEFT - 8, top + 17, f"device {device}", "end"))
            parts.append(_box(LEFT, top, timeline.seconds * scale, "idle"))
            for done in row:
                later = " late" if done.stage >= len(timeline.rows) else ""
                tip = f"{dict(KINDS)[done.kind]} of micro-batch {done.micro} in stage {done.stage}"
                tip += ", {} to {}".format(*format_durations(done.begin, done.end))
                width = (done.end - done.begin) * scale
                parts.append(_box(LEFT + done.begin * scale, top, width, done.kind + later, tip))
                if width >= 12:
                    middle = LEFT + (done.begin + done.end) / 2 * scale
                    parts.append(svg.text(middle, top + 17, f"{done.micro}", "in"))
            top += ROW + GAP
        top += 10
    parts += _legend(top)
    names = ", ".join(timeline.schedule for timeline in timelines)
    return drawing(top + 24, f"one step of a pipeline: {names}", parts)


def _legend(top: float) -> list[str]:
    parts, x = [], float(LEFT)
    for kind, name in (*KINDS, ("idle", "waiting")):
        parts.append(svg.box(x, top, 12, 12, kind))
        parts.append(svg.text(x + 17, top + 10, name))
        x += 40 + 7 * len(name)
    parts.append(svg.text(x, top + 10, "paler: later stages of the same device; numbers are micro-batches"))
    return parts


def _box(x: float, top: float, width: float, style: str, words: str = "") -> str:
    return svg.box(f"{x:.2f}", top, f"{max(0.4, width - 0.8):.2f}", ROW, style, words)  # passes may be thin
