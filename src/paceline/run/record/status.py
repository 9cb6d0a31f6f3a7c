"""The status line: one per interval, drawn for a terminal, plain otherwise."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TextIO

from paceline.plan.flops import OWN
from paceline.run.loop.step import StepStats
from paceline.run.process.brief import Brief
from paceline.units import format_count, format_seconds

BARS = "▁▂▃▄▅▆▇"


def sparkline(values: Sequence[float], width: int = 7) -> str:
    """Return the values as a row of bars, the latest at the right; each bar is the mean of an equal share."""
    if not values:
        return ""
    width = min(width, len(values))
    means = []
    for bar in range(width):
        share = values[len(values) * bar // width : len(values) * (bar + 1) // width]
        means.append(sum(share) / len(share))
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in means)


class StatusLine:
    """Prints how training goes, on rank 0, every `every` steps."""

    def __init__(self, brief: Brief, every: int, stream: TextIO | None = None) -> None:
        self._brief = brief
        self._every = every
        self._stream = stream or sys.stdout
        self._losses: list[float] = []
        self._recent: list[StepStats] = []

    def step(self, stats: StepStats) -> None:
        """Take note of a step, and print when the interval is over."""
        self._losses.append(stats.loss)
        self._recent.append(stats)
        if stats.step % self._every == 0 or stats.step == self._brief.steps or len(self._losses) == 1:
            print(self._line(stats), file=self._stream, flush=True)
            self._recent.clear()

    def _line(self, stats: StepStats) -> str:
        brief = self._brief
        seconds = sorted(s.seconds["total"] for s in self._recent)[len(self._recent) // 2]
        rate = stats.weight / seconds
        left = (brief.steps - stats.step) * seconds
        losses = [f"{name} {turn.loss:.4f}" for name, turn in stats.turns.items()] or [f"{stats.loss:.4f}"]
        parts = [f"step {stats.step:>{len(str(brief.steps)) + 1}}/{brief.steps}", f"loss {', '.join(losses)}"]
        if self._stream.isatty():
            parts.append(sparkline(self._losses))
        parts.append(f"{format_seconds(seconds)} (forecast {format_seconds(brief.step_seconds)})")
        parts.append(f"{format_count(rate)} {'tok' if brief.unit == 'tokens' else 'samples'}/s")
        if math.isfinite(brief.peak_flops):
            parts.append(f"mfu {brief.model_flops_per_step / seconds / brief.peak_flops:.0%} ({OWN})")
        parts.append(f"eta {format_seconds(left)}" if left else "done")
        if math.isfinite(brief.usd_per_second):
            parts.append(f"${brief.usd_per_second * stats.step * seconds:.2f}")
        return "  ".join(parts)

    def say(self, text: str) -> None:
        """Print one line that is not a step."""
        print(text, file=self._stream, flush=True)
