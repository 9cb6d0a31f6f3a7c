"""Draw: sweeps as SVG files that stand alone, without a script or an outside resource."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline import svg
from paceline.simulate.policy import duration_text
from paceline.simulate.sweep import IntervalSweep
from paceline.spec.forecast import Z95

WIDTH, LEFT, RIGHT = 960, 70, 16
STYLE = (
    "text{font:12px system-ui,-apple-system,sans-serif;fill:#58616c}.in{font-size:10px;fill:#fff;text-anchor:middle}"
    ".end{text-anchor:end}.mid{text-anchor:middle}.F{fill:#2360c5}.B{fill:#c4500c}.W{fill:#12937f}"
    ".late{fill-opacity:.72}.idle{fill:#e9ecf0}.grid{stroke:#dde1e7}.line{fill:none;stroke:#2360c5;stroke-width:2}"
    ".formula{stroke:#8457d8;stroke-dasharray:5 4}.mark{stroke:#737b86;stroke-dasharray:2 3}.dot{fill:#2360c5}"
)


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
    return drawing(height, "goodput over the interval between checkpoints", parts)


def drawing(height: float, label: str, parts: Sequence[str]) -> str:
    """Return a whole SVG file of what was drawn, on white, with the rules of STYLE."""
    paper = svg.element("rect", width="100%", height="100%", fill="#fff")
    return svg.picture(WIDTH, height, label, [paper, *(f"\n{part}" for part in parts), "\n"], rules=STYLE) + "\n"
