"""Pictures of choices: plans of one cluster by time and memory, clusters by time and money. Plain SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline import svg
from paceline.cluster.store import probe_command
from paceline.durable import write_output
from paceline.errors import ConfigError
from paceline.plan.explain.compare_clusters import Comparison
from paceline.plan.explain.money import money_text
from paceline.plan.planned import Planned
from paceline.plan.search.pareto import front_of
from paceline.units import format_bytes, format_seconds

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 30, 44
CELL = 6  # plans closer to each other than so many pixels are one dot
RADIUS = {"some": 2.5, "front": 4, "chosen": 8}  # of marks, in pixels
SLOWEST = 4.0  # times the best: slower plans are not drawn
STYLE = "".join(
    f".choices {rule}"
    for rule in (
        "text{font:12px system-ui,-apple-system,sans-serif;fill:#6a7480}",
        ".axis{stroke:#a0a9b4;stroke-width:1}",
        ".some{fill:#a0a9b4;fill-opacity:.45}",
        ".front{fill:#2360c5}",
        ".line{fill:none;stroke:#2360c5;stroke-width:1.5}",
        ".chosen{fill:none;stroke:#a8600c;stroke-width:3}",
    )
)


@dataclass(frozen=True)
class Mark:
    """One point of a picture."""

    x: float
    y: float
    style: str  # some, front, chosen
    tip: str
    label: str = ""


@dataclass(frozen=True)
class Axis:
    """What is drawn along an axis, logarithmically, and how its figures read."""

    title: str
    text: Callable[[float], str]


def write_front(planned: Planned, path: Path) -> None:
    """Write the plans that fit as a picture. Raises ConfigError for another ending than .svg."""
    _write(path, front_svg(planned))


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write clusters as a picture. Raises ConfigError for another ending than .svg, and where a price is unknown."""
    _write(path, comparison_svg(comparison))


def _write(path: Path, text: str) -> None:
    if path.suffix != ".svg":
        raise ConfigError(f"--picture {path}", "pictures are SVG", f"{path.with_suffix('.svg')}")
    write_output(path, text)


def front_svg(planned: Planned) -> str:
    """Return plans by time and memory: those that fit in grey, the Pareto front in blue, the chosen one ringed.

    Where many plans fall on one spot, one is drawn; those that take more than four times the best are not.
    """
    candidates = planned.search.candidates
    values = candidates.values
    places, names = front_of(values)
    if not names or "memory" not in names:
        cluster = planned.cluster
        raise ConfigError("--picture without a time of a step", "a rate of the cluster is unknown",
                          probe_command(cluster.device.kind, cluster.devices_per_node))  # fmt: skip
    drawn = np.flatnonzero(values.time <= SLOWEST * np.min(values.time))
    marks = [Mark(values.time[at], values.memory[at], "some", "") for at in drawn]
    for place in places[values.time[places] <= SLOWEST * np.min(values.time)]:
        words = f"{format_seconds(values.time[place])}, {format_bytes(values.memory[place])}"
        marks.append(Mark(values.time[place], values.memory[place], "front", f"{candidates.plan(int(place))}: {words}"))
    marks.append(Mark(values.time[0], values.memory[0], "chosen", f"chosen: {planned.plan}", "chosen"))
    title = (
        f"{planned.profile.name} on {planned.cluster.devices:,} x {planned.cluster.device.name}: "
        f"{len(candidates):,} plans fit; blue: none is better in all of {', '.join(names)}"
    )
    return chart_svg(title, marks, Axis("time of a step", format_seconds), Axis("memory", format_bytes))


def comparison_svg(comparison: Comparison) -> str:
    """Return clusters by time and money: the Pareto front in blue, the best by the goal ringed."""
    rows = [(at, row) for at, row in enumerate(comparison.rows) if math.isfinite(row.finish_seconds * row.usd)]
    if not rows:
        raise ConfigError("--picture of clusters", "time or price is unknown of all of them", "a price in [cluster]")
    marks = []
    for at, row in rows:
        name = f"{row.devices} x {row.device}"
        tip = f"{name}: {format_seconds(row.finish_seconds)}, {money_text(row.usd)}"
        marks.append(Mark(row.finish_seconds, row.usd, "front" if row.on_front else "some", tip, name))
        if at == comparison.best:
            marks.append(Mark(row.finish_seconds, row.usd, "chosen", tip))
    front = ", ".join(comparison.front)
    title = f"{len(rows)} clusters; blue: none is better in all of {front}; ringed: best by the goal"
    return chart_svg(title, marks, Axis("time to finish", format_seconds), Axis("money", money_text))


def chart_svg(title: str, marks: Sequence[Mark], across: Axis, up: Axis) -> str:
    """Return points on two logarithmic axes; marks of style "front" are joined by a line."""
    xs, ys = LogAxis([mark.x for mark in marks]), LogAxis([mark.y for mark in marks])

    def at(mark: Mark) -> tuple[float, float]:
        x = LEFT + xs(mark.x) * (WIDTH - LEFT - RIGHT)
        return round(x, 1), round(HEIGHT - BOTTOM - ys(mark.y) * (HEIGHT - TOP - BOTTOM), 1)

    seen: set[tuple[int, int]] = set()
    parts = [
        svg.element("path", d=f"M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}", fill="none", style="axis"),
        svg.text(LEFT, 18, title),
        svg.text(WIDTH - RIGHT, HEIGHT - 8, f"{across.title}, logarithmic", anchor="end"),
    ]
    front = sorted(at(mark) for mark in marks if mark.style == "front")
    if len(front) > 1:
        parts.append(svg.curve(front, "line"))
    for mark in marks:
        x, y = at(mark)
        cell = (int(x / CELL), int(y / CELL))
        if mark.style == "some" and not mark.label and cell in seen:
            continue
        seen.add(cell)
        parts.append(svg.dot(x, y, RADIUS[mark.style], mark.style, mark.tip))
        if mark.label:
            left = x > WIDTH * 0.75
            parts.append(svg.text(x + (-12 if left else 12), y + 4, mark.label, anchor="end" if left else ""))
    for share in (0.0, 0.5, 1.0):
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        parts.append(svg.text(x, HEIGHT - BOTTOM + 16, across.text(xs.back(share)), anchor="middle"))
        parts.append(svg.text(LEFT - 8, y + 4, up.text(ys.back(share)), anchor="end"))
    return svg.picture(WIDTH, HEIGHT, title, parts, name="choices", rules=STYLE, fixed=True)


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis: values to parts of its length, and back."""

    values: Sequence[float]

    @property
    def ends(self) -> tuple[float, float]:
        """The logarithms at both ends; equal values stand in the middle."""
        low, high = math.log(min(self.values)), math.log(max(self.values))
        return (low - 0.05, high + 0.05) if high - low < 0.1 else (low, high)

    def __call__(self, value: float) -> float:
        """Return where along the axis a value stands."""
        low, high = self.ends
        return (math.log(value) - low) / (high - low)

    def back(self, share: float) -> float:
        """Return the value at a part of the axis."""
        low, high = self.ends
        return math.exp(low + share * (high - low))
