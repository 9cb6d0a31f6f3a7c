"""A comparison of runs in lines for people."""

from __future__ import annotations

from paceline.observe.compare.runs import RunComparison
from paceline.report.format import quantity
from paceline.units import format_count, format_loss, format_seconds

MOST_DIFFERENCES, WIDTH = 30, 36


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
    lines += ["", f"at step {found.step:,}, over the last {found.last_steps} steps; {found.note}"]
    lines += [f"{each.figure:<14} {each.text}" for each in found.figures]
    if found.differences:
        lines += ["", "what differs"]
    for option in found.differences[:MOST_DIFFERENCES]:
        lines.append(f"  {option.name:<{WIDTH}} {'  |  '.join(_short(value) for value in option.values)}")
    left = len(found.differences) - MOST_DIFFERENCES
    return [*lines, f"  and {left:,} more: --json has all"] if left > 0 else lines


def _short(value: str) -> str:
    return value if len(value) <= WIDTH else value[: WIDTH - 1] + "…"
