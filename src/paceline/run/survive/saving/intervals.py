"""Intervals between checkpoints that cost the least: from what a save costs here and how often machines fail."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from paceline.simulate.failures import FailureRates
from paceline.simulate.interval import daly_interval
from paceline.units import SECONDS_PER_HOUR, format_seconds

REMEMBERED = 20  # measurements of a kind; the median of them counts
WORTH = 1.25  # an interval that is longer or shorter by less than this stays as it is


@dataclass
class Cadence:
    """When checkpoints of a tier are due. One that `adapts` counts from the one before, not from the first step.

    `every_steps` is None where none is due by itself.
    """

    every_steps: int | None
    adapts: bool = False
    last: int = 0  # the step of the checkpoint before, made or tried, or of the start

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after the step."""
        if not self.every_steps:
            return False
        return step - self.last >= self.every_steps if self.adapts else step % self.every_steps == 0


@dataclass
class Measured:
    """What saves and steps took on rank 0, in seconds; the forecast, and what the spec assumes, until there is more."""

    step_seconds: float
    stall_seconds: float
    write_seconds: float
    is_known: bool = False  # from a world before this one
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _stalls: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _writes: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def stepped(self, seconds: float) -> None:
        """Take note of what a step took, and what lies between it and the next but saves."""
        self._steps.append(seconds)
        self.step_seconds = statistics.median(self._steps)

    def saved(self, stall_seconds: float, write_seconds: float) -> None:
        """Take note of what a save took: what training waited for its copy, and until it was published."""
        self._stalls.append(stall_seconds)
        self._writes.append(write_seconds)
        self.stall_seconds, self.write_seconds = statistics.median(self._stalls), statistics.median(self._writes)

    @property
    def source(self) -> str:
        """What the seconds of a save are: measured, or assumed until there was one."""
        return "measured" if self._stalls or self.is_known else "assumed"

    def as_known(self) -> Measured:
        """Return what another world begins with: its own measurements take the place of these."""
        return Measured(self.step_seconds, self.stall_seconds, self.write_seconds, self.source == "measured")


@dataclass(frozen=True)
class ChosenInterval:
    """An interval in steps, and the reason for it."""

    every_steps: int
    because: str
    evidence: dict[str, float | str]


def mtbf_seconds(rates: FailureRates, devices: int, machine_lost: bool = False) -> float:
    """Return the mean time between failures of a job; of those that take a machine along, where that is asked."""
    hourly = sum(
        cause.per_device_hour for cause in rates.causes if not cause.planned and (cause.evicts or not machine_lost)
    )
    return SECONDS_PER_HOUR / (hourly * devices) if hourly else math.inf


def choose(measured: Measured, mtbf: float, longest_steps: int, failures: int = 0) -> ChosenInterval:
    """Return the interval at which stalls and lost work together cost the least (Daly 2006, `simulate/interval.py`).

    It is not shorter than a save takes, since one is under way at a time, nor than a step, nor longer than
    `longest_steps`: a run that nothing is expected to fail still has some progress to lose. `failures` are those of
    this run that the mean time between failures has learnt from.
    """
    best = daly_interval(measured.stall_seconds, mtbf)
    seconds = max(best, measured.write_seconds)
    steps = max(1, math.ceil(seconds / measured.step_seconds)) if math.isfinite(seconds) else longest_steps
    steps = min(steps, longest_steps)
    failing = f"a failure every {format_seconds(mtbf)}" if math.isfinite(mtbf) else "no failure rate known"
    failing += f" (this run has had {failures})" if failures else ""
    because = (
        f"every {steps} steps: {failing}, a stall of {format_seconds(measured.stall_seconds)} and"
        f" {format_seconds(measured.write_seconds)} to write ({measured.source}), steps of"
        f" {format_seconds(measured.step_seconds)}"
    )
    evidence: dict[str, float | str] = {
        "mtbf_seconds": mtbf if math.isfinite(mtbf) else "unknown",
        "failures": float(failures),
        "stall_seconds": measured.stall_seconds,
        "write_seconds": measured.write_seconds,
        "step_seconds": measured.step_seconds,
        "source": measured.source,
    }
    return ChosenInterval(steps, because, evidence)


def is_worth_a_change(now: int | None, chosen: int) -> bool:
    """Return whether another interval is so different that it is taken."""
    return now is None or max(now, chosen) / min(now, chosen) >= WORTH
