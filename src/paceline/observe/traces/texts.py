"""A summary of a trace in lines for a terminal."""

from __future__ import annotations

from paceline.observe.traces.summary import LEAST_SHARE, TraceSummary
from paceline.units import format_bytes, format_seconds


def trace_lines(found: TraceSummary) -> list[str]:
    """Return where the steps of a trace went, by class of work, with what was forecast."""
    steps = f"step {found.first}" if found.first == found.last else f"steps {found.first} to {found.last}"
    lines = [
        f"rank {found.rank}, {steps}: {format_seconds(found.step_seconds)} each, tracing included",
        f"  {'class of work':34} {'a step':>9} {'share':>6} {'forecast':>9}  most of it",
    ]
    for each in found.classes:
        share = each.seconds / found.step_seconds if found.step_seconds > 0 else 0.0
        if share < LEAST_SHARE and not each.forecast:
            continue
        said = "" if each.forecast is None else format_seconds(each.forecast)
        most = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in each.most if seconds > 0)
        lines.append(f"  {each.name:34} {format_seconds(each.seconds):>9} {share:>6.1%} {said:>9}  {most}")
    hidden = found.hidden_share
    if hidden is not None:
        took = format_seconds(found.communication_seconds)
        lines.append(f"  of {took} of communication {hidden:.0%} was hidden behind computing")
    if found.gaps and found.gaps[0][1] > 0:
        lines.append(
            f"  the host started nothing for longest in: {found.gaps[0][0]} ({format_seconds(found.gaps[0][1])})"
        )
    for more in found.grown[:5]:
        lines.append(f"  grown: {more['more']} more of {more['tensors']} ({format_bytes(more['bytes'])})")
    return lines
