"""A comparison of runs as HTML."""

from __future__ import annotations

from paceline.observe.compare.runs import ALONE, RunComparison
from paceline.observe.compare.short_names import short_names
from paceline.report.charts import Line, line_chart
from paceline.report.drawn.figures import CEILING, figure
from paceline.report.drawn.markup import esc, note_html, pill, section, table_html
from paceline.report.format import quantity
from paceline.units import format_count, format_loss, format_seconds

MOST_DIFFERENCES = 200
MANY = 4  # runs from which on curves come before a table that has each of them in several rows


def compare_html(found: RunComparison) -> str:
    """Return the comparison: curves, figures, how sure their differences are, and what differs between the runs."""
    are_few = len(found.runs) < MANY
    names = " and ".join(run.name for run in found.runs) if are_few else f"{len(found.runs)} runs"
    figures = section("Is one better", _figures(found))
    return (
        f'<header><div class="eyebrow">Paceline, compared</div><h1>{esc(names)}</h1>'
        f'<p class="meta">at step {found.step:,}, the last one that all have; losses are means of the last'
        f" {found.last_steps} steps</p></header>"
        + (figures if are_few else "")
        + section("Loss", _chart(found, 0, "loss per item", "Losses of the runs over steps"))
        + section(
            "Speed", _chart(found, 1, "seconds per step", "Seconds per step of the runs over steps", is_usual=True)
        )
        + section("The runs", _runs(found))
        + ("" if are_few else figures)
        + section("What differs between them", _differences(found))
    )


def _figures(found: RunComparison) -> str:
    rows, against = [], {each.against for each in found.figures}
    kinds = list(dict.fromkeys(each.figure for each in found.figures))
    for each in sorted(found.figures, key=lambda each: kinds.index(each.figure)):
        style, word = ("good", f"{each.better} is better") if each.better else ("none", "not told from noise")
        if each.lower and not each.better:
            word = f"lower in {each.lower}; {ALONE}"
        if each.sure is None:
            style, word = "none", "noise not known" if each.difference else "equal"
        noise = each.noise_text or "–"
        sure = "–" if each.sure is None else f"{min(each.sure, 0.9999):.4g}"
        relative = "–" if each.relative is None else f"{each.relative:+.1%}"
        whose = each.run if len(against) == 1 else f"{each.run} against {each.against}"
        cells = (whose, each.called, each.difference_text, relative, noise, sure)
        rows.append((*map(esc, cells), pill(style, word)))
    first = f"against {against.pop()}" if len(against) == 1 else "runs"
    head = (first, "figure", "difference", "relative", "95 % interval", "how sure", "")
    return table_html(head, rows, (2, 3, 4, 5)) + note_html(found.note + ".")


def _chart(found: RunComparison, which: int, y_label: str, label: str, is_usual: bool = False) -> str:
    """Return the runs' curves; with `is_usual` a few values far above the usual ones do not flatten the rest."""
    names = short_names([run.name for run in found.runs])
    both = enumerate(zip(names, found.curves, strict=True))
    lines = [Line(name, curve[which].points, _style(index)) for index, (name, curve) in both]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    values = [value for line in lines for _, value in line.points]
    height = 300 if len(lines) < 9 else 460
    usual = CEILING * max(_p95(line) for line in lines) if is_usual else None
    log = usual is None and min(values) > 0 and max(values) > 20 * min(values)
    chart = line_chart(lines, label=label, x_label="step", y_label=y_label, log=log, height=height, ceiling=usual)
    return figure(chart)


def _style(index: int) -> str:
    """Return the look of a curve: eight colours, then the same dashed, then dotted."""
    return f"c{index % 8}" + ("", " dashed", " dotted")[index // 8 % 3]


def _p95(line: Line) -> float:
    values = sorted(value for _, value in line.points)
    return values[int(0.95 * (len(values) - 1))]


def _runs(found: RunComparison) -> str:
    rows = [
        (
            esc(run.name),
            esc(run.status),
            f"{run.steps:,}",
            esc(format_loss(run.loss)),
            esc(format_loss(run.held_out)),
            "–" if run.step_seconds is None else esc(format_seconds(run.step_seconds)),
            "–" if run.items_per_second is None else esc(format_count(run.items_per_second)),
            esc(quantity(run.peak_bytes, "B")),
            esc(quantity(run.usd, "USD")),
            esc(quantity(run.kwh, "kWh")),
            esc(run.plan),
        )
        for run in found.runs
    ]
    head = ("run", "status", "steps", "loss", "held-out", "step", "items/s", "memory", "money", "energy", "plan")
    return table_html(head, rows, range(2, 10))


def _differences(found: RunComparison) -> str:
    rows = [(esc(each.name), *map(esc, each.values)) for each in found.differences[:MOST_DIFFERENCES]]
    more = len(found.differences) - len(rows)
    note = note_html(f"and {more:,} more, which `paceline compare --json` has") if more > 0 else ""
    return table_html(("", *(run.name for run in found.runs)), rows) + note
