"""Draw: pipelines and sweeps as SVG files that stand alone, without a script or an outside resource."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline import svg
from paceline.simulate.policy import duration_text
from paceline.simulate.schedules.timeline import Timeline
from paceline.simulate.sweep import IntervalSweep
from paceline.spec.forecast import Z95
from paceline.units import format_durations, format_seconds

WIDTH, LEFT, RIGHT, ROW, GAP = 960, 70, 16, 26, 4
STYLE = (
    "text{font:12px system-ui,-apple-system,sans-serif;fill:#58616c}.in{font-size:10px;fill:#fff;text-anchor:middle}"
    ".end{text-anchor:end}.mid{text-anchor:middle}.F{fill:#2360c5}.B{fill:#c4500c}.W{fill:#12937f}"
    ".late{fill-opacity:.72}.idle{fill:#e9ecf0}.grid{stroke:#dde1e7}.line{fill:none;stroke:#2360c5;stroke-width:2}"
    ".formula{stroke:#8457d8;stroke-dasharray:5 4}.mark{stroke:#737b86;stroke-dasharray:2 3}.dot{fill:#2360c5}"
)
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
    return _document(top + 24, f"one step of a pipeline: {names}", parts)


def _legend(top: float) -> list[str]:
    parts, x = [], float(LEFT)
    for kind, name in (*KINDS, ("idle", "waiting")):
        parts.append(svg.box(x, top, 12, 12, kind))
        parts.append(svg.text(x + 17, top + 10, name))
        x += 40 + 7 * len(name)
    parts.append(svg.text(x, top + 10, "paler: later stages of the same device; numbers are micro-batches"))
    return parts


def intervals_svg(sweep: IntervalSweep) -> str:
    """Return goodput over the interval between checkpoints: simulated, by formula, and where the formulas' best lie."""
    height, top, bottom = 360.0, 30.0, 310.0
    places = [math.log(point.every) for point in sweep.points]
    values = [value for point in sweep.points for value in (point.goodput, point.expected_goodput)]
    low, high = min(values), max(values)
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)

    def x(every: float) -> float:
        return LEFT + (math.log(every) - places[0]) / ((places[-1] - places[0]) or 1) * (WIDTH - LEFT - RIGHT - 60)

    def y(goodput: float) -> float:
        return bottom - (goodput - low) / (high - low) * (bottom - top)

    parts = [svg.text(LEFT - 8, 16, "goodput", "end")]
    for step in range(5):
        value = low + (high - low) * step / 4
        parts.append(svg.rule(LEFT, y(value), WIDTH - RIGHT, y(value), "grid"))
        parts.append(svg.text(LEFT - 8, y(value) + 4, f"{value:.1%}", "end"))
    for point in sweep.points:
        parts.append(svg.text(x(point.every), bottom + 18, duration_text(point.every), "mid"))
    parts.append(svg.text((LEFT + WIDTH) / 2, bottom + 38, "work between checkpoints", "mid"))
    for at, name, above in ((sweep.young, "Young", 22), (sweep.daly, "Daly", 6)):
        parts.append(svg.rule(x(at), top, x(at), bottom, "mark"))
        parts.append(svg.text(x(at) + 4, bottom - above, f"{name} {duration_text(at)}"))
    for values_of, style in (("expected_goodput", "line formula"), ("goodput", "line")):
        parts.append(svg.curve([(x(point.every), y(getattr(point, values_of))) for point in sweep.points], style))
    for point in sweep.points:
        at, around = x(point.every), Z95 * point.standard_error
        parts.append(svg.rule(at, y(point.goodput - around), at, y(point.goodput + around), "line"))
        parts.append(svg.dot(at, y(point.goodput), 3.5, "dot"))
    parts.append(svg.text(WIDTH - RIGHT, 16, "solid: simulated, 95 % bars; dashed: Daly's formula", "end"))
    return _document(height, "goodput over the interval between checkpoints", parts)


def _box(x: float, top: float, width: float, style: str, words: str = "") -> str:
    return svg.box(f"{x:.2f}", top, f"{max(0.4, width - 0.8):.2f}", ROW, style, words)  # passes may be thin


def _document(height: float, label: str, parts: Sequence[str]) -> str:
    paper = svg.element("rect", width="100%", height="100%", fill="#fff")
    return svg.picture(WIDTH, height, label, [paper, *(f"\n{part}" for part in parts), "\n"], rules=STYLE) + "\n"
