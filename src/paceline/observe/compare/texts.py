"""A comparison of runs in lines for people."""

from __future__ import annotations

from paceline.observe.compare.runs import RunComparison
from paceline.report.format import quantity
from paceline.units import format_count, format_loss, format_seconds, plural

MOST_DIFFERENCES = 30  # options that are shown
WIDTH, LEAST_VALUE, MOST_VALUE = 100, 12, 36  # columns of a line, and characters of a value in it
BETWEEN = "  |  "  # two values
HANGING = 15  # columns that the name of a figure takes
TOLD_WHOLE = 2  # of so many runs every difference is told in words


def compare_lines(found: RunComparison) -> list[str]:
    """Return the runs' figures as a table, how they differ, and what differs between them."""
    head = ("run", "status", "steps", "loss", "held-out", "step", "items/s", "memory", "money")
    rows = [head]
    for run in found.runs:
        rows.append(
            (
                run.name, run.status, f"{run.steps:,}", format_loss(run.loss), format_loss(run.held_out),
                "–" if run.step_seconds is None else format_seconds(run.step_seconds),
                "–" if run.items_per_second is None else format_count(run.items_per_second),
                quantity(run.peak_bytes, "B"), quantity(run.usd, "USD"),
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    held = "" if found.held_out_step is None else f", held-out losses after step {found.held_out_step:,}"
    lines += ["", f"at step {found.step:,}, over the last {plural(found.last_steps, 'step')}{held}; {found.note}"]
    told = found.figures
    if len(found.runs) > TOLD_WHOLE:  # the table has the values of the others
        told = tuple(each for each in told if each.sure is not None)
    lines += [f"{each.called:<14} {each.text}" for each in told]
    if left := len(found.figures) - len(told):
        lines.append(f"{plural(left, 'difference')} whose noise is not known: the table above, or --json")
    if found.differences:
        lines += ["", "what differs"]
    shown = found.differences[:MOST_DIFFERENCES]
    width = max((len(option.name) for option in shown), default=0)
    for option in shown:
        each = (WIDTH - width - 4 + len(BETWEEN)) // max(len(option.values), 1) - len(BETWEEN)
        values = (_short(value, min(max(each, LEAST_VALUE), MOST_VALUE)) for value in option.values)
        lines.append(f"  {option.name:<{width}}  {BETWEEN.join(values)}")
    left = len(found.differences) - MOST_DIFFERENCES
    return [*lines, f"  and {left:,} more: --json has all"] if left > 0 else lines


def _short(value: str, columns: int) -> str:
    return value if len(value) <= columns else value[: columns - 1] + "…"
