"""The status line: one per interval, drawn for a terminal, plain otherwise. It is a sink of the run's records."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import numpy as np

from paceline.plan.flops import OWN
from paceline.plan.learn.curve import expected_loss
from paceline.said import end_line, is_shown, say_line, say_over
from paceline.spec.journal.bound import VerdictRecord
from paceline.spec.journal.kinds import EvaluationRecord, StepRecord, WrittenRecord
from paceline.spec.journal.record import Record
from paceline.spec.journal.watching import NodeSample, device_line
from paceline.supervise.told.brief import Brief
from paceline.units import format_count, format_durations, format_loss, format_seconds, format_usd

REFIT = 1.1  # times as many losses, after which a curve is fitted anew
BARS = "▁▂▃▄▅▆▇"
KEPT = 448  # of a curve, for bars that are drawn anew in every line


def sparkline(values: Sequence[float], width: int = 7) -> str:
    """Return the values as a row of bars, the latest at the right; each bar is the mean of an equal share.

    Those that are no finite number are left out.
    """
    values = [value for value in values if math.isfinite(value)]
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


class Outline:
    """The course of a series in no more than 2 `KEPT` means, of as many values each, however long it grows.

    Values that are no finite number are left out.
    """

    def __init__(self) -> None:
        self._means: list[float] = []
        self._each = 1  # values that a mean is of
        self._sum, self._count = 0.0, 0  # of the values that are no mean yet

    def add(self, value: float) -> None:
        """Take the next value."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._each:
            self._means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._means) == 2 * KEPT:
            self._means = [
                (first + second) / 2 for first, second in zip(self._means[::2], self._means[1::2], strict=True)
            ]
            self._each *= 2

    def values(self) -> list[float]:
        """Return the means, the latest last."""
        return [*self._means, self._sum / self._count] if self._count else self._means


class StatusLine:
    """Prints how training goes, on rank 0, every `every` steps."""

    def __init__(
        self, brief: Brief, every: int, steps_left: Callable[[], float | None] = lambda: None,
        stream: TextIO | None = None,
    ) -> None:  # fmt: skip
        """`steps_left` says how many steps the run's budgets still buy; None where there is none."""
        self._brief, self._steps_left = brief, steps_left
        self._every = every
        self._stream = stream or sys.stdout
        self._outline = Outline()  # of the losses
        self._losses: list[float] = []
        self._steps: list[float] = []  # of these losses
        self._expected, self._fitted = "", 0  # the loss that a budget buys, and of how many losses that is told
        self._node = ""  # what the newest sample of the first node says of its devices
        self._recent: list[float] = []  # seconds of the steps since the last line
        self._bound: VerdictRecord | None = None  # what bounds steps, by the newest comparison of ranks

    def write(self, record: Record) -> None:
        """Take note of a step, and print when the interval is over; print evaluations."""
        if isinstance(record, StepRecord):
            self._step(record)
        elif isinstance(record, NodeSample):
            self._node = device_line(record.signals)
        elif isinstance(record, EvaluationRecord):
            self._evaluation(record)
        elif isinstance(record, VerdictRecord):
            self._bound = record
        elif isinstance(record, WrittenRecord):
            for prompt, text in zip(record.prompts, record.texts, strict=True):
                self.say(f"sample   after step {record.step}: {prompt!r} -> {text!r}")

    def close(self) -> None:
        """End the line of the last step, where steps are shown in one."""
        end_line(self._stream)

    def _step(self, record: StepRecord) -> None:
        assert record.step is not None and record.loss is not None
        self._outline.add(record.loss)
        self._losses.append(record.loss)
        self._steps.append(record.step)
        self._recent.append(record.seconds["total"])
        if record.step % self._every == 0 or record.step == self._brief.steps or len(self._losses) == 1:
            line = self._line(record, record.step, record.loss)
            say_over(line, self._stream) if self._brief.redraws else self.say(line)
            self._recent.clear()

    def _evaluation(self, record: EvaluationRecord) -> None:
        sets = {"": {"loss": record.loss, "metrics": record.metrics}, **(record.sets or {})}
        for name, each in sets.items():
            of = f" ({name})" if name else ""
            named = {"loss": each["loss"], **(each.get("metrics") or {})}
            values = ", ".join(f"{what} {format_loss(value)}" for what, value in named.items())
            self.say(f"held-out{of} {values} after step {record.step}")

    def _line(self, record: StepRecord, step: int, loss: float) -> str:
        brief = self._brief
        seconds = sorted(self._recent)[len(self._recent) // 2]
        taken = (record.position_after or 0) - (record.position_before or 0)
        rate = brief.items_of_step(taken, record.weight or 0.0) / seconds
        left = (brief.steps - step) * seconds
        losses = [f"{name} {format_loss(turn['loss'])}" for name, turn in (record.turns or {}).items()]
        losses = losses or [format_loss(loss)]
        parts = [f"step {step:>{len(str(brief.steps)) + 1}}/{brief.steps}", f"loss {', '.join(losses)}"]
        if self._brief.redraws or is_shown(self._stream):
            parts.append(sparkline(self._outline.values()))
        parts.append("{} (forecast {})".format(*format_durations(seconds, brief.step_seconds)))
        parts.append(f"{format_count(rate)} {'tok' if brief.unit == 'tokens' else 'samples'}/s")
        if math.isfinite(brief.peak_flops):
            counted = f" ({OWN})" if brief.unit == "tokens" else ""  # how attention is: of images it is no half
            parts.append(f"mfu {brief.model_flops_per_step / seconds / brief.peak_flops:.0%}{counted}")
        if self._bound is not None and step - (self._bound.step or 0) <= max(self._bound.steps or 0, self._every):
            parts.append(self._bound.short)  # of steps of this line, or of as many as there were since
        parts.append(f"eta {format_seconds(left)}" if left else "done")
        if math.isfinite(brief.usd_per_second):
            parts.append(format_usd(brief.usd_per_second * step * seconds))
        if (further := self._steps_left()) is not None:
            parts.append(f"budget buys {format_count(further)} steps{self._loss_after(further)}")
        return "  ".join([*parts, *([self._node] if self._node else [])])

    def _loss_after(self, further: float) -> str:
        """Return the loss that so many further steps lead to, fitted anew where the curve has grown by a part."""
        if len(self._losses) > self._fitted * REFIT:
            self._fitted = len(self._losses)
            found = expected_loss(np.array(self._steps), np.array(self._losses), further)
            self._expected = f", to {found.text}" if found is not None else ""
        return self._expected

    def say(self, text: str) -> None:
        """Print one line that is not a step."""
        say_line(text, self._stream)
