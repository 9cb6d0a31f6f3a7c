"""Charts as SVG text: pure functions of plain data, without a dependency, a script or an outside resource.

Colours are CSS classes that style.py defines for light and dark. Each chart says in an `aria-label` what it shows;
hovering shows values through `<title>` elements.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline import svg
from paceline.report.scale import Scale, scale_for, ticks_of

WIDTH = 760
LEFT, RIGHT, TOP, BOTTOM = 62, 106, 26, 42
HOVER_COLUMNS = 100
CHARACTER_PIXELS = 7.2  # of the 12 px system font, for placing labels only

Point = tuple[float, float]
Format = Callable[[float], str]
Label = tuple[float, str, str]  # height, words, class


@dataclass(frozen=True)
class Line:
    """A curve: its points in rising x, a class of style.py ("train", "held", "faint", "dim") and a direct label."""

    label: str
    points: Sequence[Point]
    style: str = "train"
    dots: bool = False


@dataclass(frozen=True)
class Band:
    """A horizontal interval with its expected value, such as a forecast."""

    low: float
    high: float
    value: float
    label: str


def plain(value: float) -> str:
    """Return a number for an axis: "0.5", "1,200", "3e-05"."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(x: float, y: float, words: str, style: str = "tick", anchor: str = "start") -> str:
    return svg.text(x, y, words, style, anchor)


def _axes(x: Scale, y: Scale, x_label: str, y_label: str, x_format: Format, y_format: Format) -> list[str]:
    parts = []
    for tick in ticks_of(y):
        parts.append(svg.rule(x.start, y(tick), x.end, y(tick), "grid"))
        parts.append(_text(x.start - 8, y(tick) + 4, y_format(tick), anchor="end"))
    for tick in (tick for tick in ticks_of(x, 8) if tick == round(tick)):  # there is no half step
        parts.append(svg.rule(x(tick), y.start, x(tick), y.start + 4, "axis"))
        parts.append(_text(x(tick), y.start + 17, x_format(tick), anchor="middle"))
    parts.append(svg.rule(x.start, y.start, x.end, y.start, "axis"))
    parts.append(_text((x.start + x.end) / 2, y.start + 35, x_label, "label", "middle"))
    parts.append(_text(4, 13, y_label, "label"))
    return parts


def _spread(wanted: list[Label], low: float, high: float, gap: float = 14) -> list[Label]:
    """Return labels with their heights moved apart so that none covers another."""
    placed: list[Label] = []
    for y, words, style in sorted(wanted):
        placed.append((max(y, placed[-1][0] + gap) if placed else max(y, low), words, style))
    over = placed[-1][0] - high if placed else 0.0
    return [(y - max(0.0, over), words, style) for y, words, style in placed]


def _path(line: Line, x: Scale, y: Scale) -> list[str]:
    if not line.points:
        return []
    pixels = [(x(a), y(b)) for a, b in line.points]
    parts = [svg.curve(pixels, f"line {line.style}")] if len(pixels) > 1 else []
    if len(pixels) == 1 or (line.dots and len(pixels) <= 60):
        parts += [svg.dot(*pixel, 3, f"dot {line.style}") for pixel in pixels]
    return parts


def _hover(lines: Sequence[Line], x: Scale, y: Scale, x_word: str, x_format: Format, y_format: Format) -> list[str]:
    """Return invisible columns that show, when hovered, the values of every line nearest to the column's middle."""
    lines = [line for line in lines if line.points]
    places = sorted({a for line in lines for a, _ in line.points})
    width = (x.end - x.start) / HOVER_COLUMNS
    parts = []
    chosen = (
        places
        if len(places) <= HOVER_COLUMNS
        else [places[index * (len(places) - 1) // (HOVER_COLUMNS - 1)] for index in range(HOVER_COLUMNS)]
    )
    for place in chosen:
        words = [f"{x_word} {x_format(place)}"]
        for line in lines:
            index = bisect.bisect_left(line.points, (place,))
            near = min(line.points[max(0, index - 1) : index + 1], key=lambda point: abs(point[0] - place))
            shown = "" if near[0] == place else f" ({x_word} {x_format(near[0])})"
            words.append(f"{line.label}: {y_format(near[1])}{shown}")
        span = max(width, (x.end - x.start) / max(1, len(chosen) - 1)) if len(chosen) > 1 else 24
        left = max(x.start - 4, x(place) - span / 2)
        parts.append(svg.box(left, y.end, min(span, x.end + 4 - left), y.start - y.end, "tip", "\n".join(words)))
    return parts


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    x_label: str,
    y_label: str,
    y_format: Format = plain,
    tip_format: Format = plain,
    reference: tuple[float, str] | None = None,
    band: Band | None = None,
    markers: Sequence[tuple[float, str]] = (),
    log: bool = False,
    zero: bool = False,
    ceiling: float | None = None,
    height: int = 300,
) -> str:
    """Return curves over steps as an SVG.

    `reference` is a labelled horizontal line, `band` a shaded interval, `markers` are labelled vertical lines.
    Values above `ceiling` are drawn at the top edge and counted in a note, so that a few outliers do not flatten
    the rest.
    """
    ys = [b for line in lines for _, b in line.points]
    above = [b for b in ys if ceiling is not None and b > ceiling]
    shown = [min(b, ceiling) if ceiling is not None else b for b in ys]
    shown += [reference[0]] if reference else []
    shown += [band.low, band.high] if band else []
    xs = [a for line in lines for a, _ in line.points] + [a for a, _ in markers]
    x = scale_for(xs, LEFT, WIDTH - RIGHT, pad=0.0)
    y = scale_for(shown, height - BOTTOM, TOP, zero=zero, log=log)
    parts = []
    if band:
        top, bottom = y(band.high), y(band.low)
        tip = f"forecast {tip_format(band.value)}, 80 % interval {tip_format(band.low)} to {tip_format(band.high)}"
        parts.append(svg.box(x.start, top, x.end - x.start, max(1.0, bottom - top), "band", tip))
        parts.append(svg.rule(x.start, y(band.value), x.end, y(band.value), "expected"))
    parts += _axes(x, y, x_label, y_label, plain, y_format)
    for place, words in markers:
        parts.append(svg.element("g", svg.rule(x(place), y.start, x(place), y.end, "marker") + svg.tip(words)))
        parts.append(_text(x(place) + 4, y.end + 10, words, "tick"))
    if reference:
        parts.append(svg.rule(x.start, y(reference[0]), x.end, y(reference[0]), "reference"))
    for line in lines:
        parts += _path(line, x, y)
    named = [line for line in lines if line.points and line.label]
    labels = [(y(line.points[-1][1]) + 4, line.label, f"end {line.style}") for line in named]
    labels += [(y(reference[0]) + 4, reference[1], "end ref")] if reference else []
    labels += [(y(band.value) + 4, band.label, "end ref")] if band else []
    parts += [_text(x.end + 8, at, words, style) for at, words, style in _spread(labels, y.end + 4, y.start)]
    if above:
        note = f"▲ beyond the scale: up to {tip_format(max(above))}"
        parts.append(_text(x.end, 13, note, "tick", "end"))
        for line in lines:
            parts += [
                svg.element("path", d=f"M{x(a) - 4:.1f} {y.end + 7:.1f}h8l-4 -7z", style="beyond")
                for a, b in line.points
                if ceiling is not None and b > ceiling
            ][:40]
    parts += _hover(named or lines, x, y, "step", plain, tip_format)
    return svg.picture(WIDTH, height, label, parts, name="chart", alone=False)


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, label: str, show: Format, names: Sequence[str]
) -> str:
    """Return one horizontal bar per row, split into named parts with a colour each, totals at the end.

    `names` fixes the colour of a part across rows and charts; parts of no width are left out.
    """
    bar, gap = 26, 16
    longest = max((len(name) for name, _ in rows), default=0)
    left = 16 + longest * CHARACTER_PIXELS if longest else 0.0
    totals = [sum(value for _, value in parts) for _, parts in rows]
    x = Scale(0.0, max([*totals, 0.0]) or 1.0, left, WIDTH - RIGHT)
    drawn = []
    for index, ((name, row), total) in enumerate(zip(rows, totals, strict=True)):
        top, reached = 4 + index * (bar + gap), 0.0
        drawn.append(_text(left - 8, top + bar / 2 + 4, name, "label", "end"))
        for part, value in row:
            begin, end = x(reached), x(reached + value)
            reached += value
            if end - begin < 0.3:
                continue
            words = f"{f'{name}: {part} {show(value)}'.strip(': ')} ({value / total:.1%})"
            drawn.append(svg.box(begin, top, max(0.8, end - begin - 1), bar, f"fill c{names.index(part) % 8}", words))
        drawn.append(_text(x(reached) + 8, top + bar / 2 + 4, show(total), "end"))
    return svg.picture(WIDTH, 8 + len(rows) * (bar + gap) - gap + 4, label, drawn, name="chart", alone=False)


def interval_bar(forecast: float, low: float, high: float, measured: float, show: Format) -> str:
    """Return a small bar: the forecast's interval, its value as a tick, the measurement as a dot."""
    x = scale_for([low, high, measured, forecast], 6.0, 214.0, pad=0.08)
    tip = f"forecast {show(forecast)} ({show(low)} to {show(high)}), measured {show(measured)}"
    parts = [
        svg.tip(tip),
        svg.rule(6, 9, 214, 9, "grid"),
        svg.box(x(low), 4, max(2.0, x(high) - x(low)), 10, "range", rx=5),
        svg.rule(x(forecast), 2, x(forecast), 16, "expected solid"),
        svg.dot(x(measured), 9, 4.5, "measured"),
    ]
    return svg.picture(220, 18, tip, parts, name="interval", alone=False)
