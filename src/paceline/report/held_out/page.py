"""The charts of metrics of held-out samples."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.charts import Line, line_chart
from paceline.report.drawn.markup import listing
from paceline.report.held_out.curves import OWN, MetricCurve


def metrics_html(curves: Sequence[MetricCurve], markers: Sequence[tuple[float, str]]) -> str:
    """Return a chart of each metric, with a line for each set, and what they came to."""
    parts = []
    for name in dict.fromkeys(curve.name for curve in curves):
        same = [curve for curve in curves if curve.name == name]
        lines = [
            Line(curve.of_set or "held-out", curve.series.points, "held" if curve.of_set == OWN else "train", dots=True)
            for curve in same
        ]
        chart = line_chart(
            lines,
            label=f"{name} of held-out samples over steps",
            x_label="step",
            y_label=name,
            markers=markers,
            height=210,
        )
        parts.append(f'<figure><div class="scroll">{chart}</div></figure>')
    rows = [
        (
            f"{curve.name} ({curve.of_set})" if curve.of_set else curve.name,
            f"{curve.last:.6g} last, {curve.lowest:.6g} lowest at step {curve.lowest_step:,}, "
            f"{curve.highest:.6g} highest at step {curve.highest_step:,}",
        )
        for curve in curves
    ]
    return "".join(parts) + listing(rows)
