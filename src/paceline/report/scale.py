"""Axes: from data to pixels, and ticks at round values."""

from __future__ import annotations

import math
from dataclasses import dataclass

LIMIT = 1e150


@dataclass(frozen=True)
class Scale:
    """Maps `low..high` to the pixels `start..end`, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, held inside the axis."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def nice_step(span: float, count: int) -> float:
    """Return the 1, 2 or 5 times a power of ten that divides a span into about `count` parts."""
    rough = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values within `low..high`."""
    step = nice_step(high - low, count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten within `low..high`, only the powers where there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    return inside[:: max(1, len(inside) // 7)] if len(inside) >= 2 else [low, high]


def scale_for(
    values: list[float], start: float, end: float, *, zero: bool = False, log: bool = False, pad: float = 0.06
) -> Scale:
    """Return a scale that shows all values with a margin; one value, or none, gets room around it.

    Values beyond LIMIT, of a run that diverged, sit at its edge. Logarithms are taken only of positive values.
    """
    low, high = (min(max(edge, -LIMIT), LIMIT) for edge in ((min(values), max(values)) if values else (0.0, 1.0)))
    if log and low > 0:
        low, high = max(low, 1 / LIMIT), max(high, 1 / LIMIT)
        if high < low * 1.01:
            low, high = low / 2, high * 2
        margin = math.exp(pad * (math.log(high) - math.log(low)))
        return Scale(low / margin, high * margin, start, end, log=True)
    if zero:
        low = min(0.0, low)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 10 or 1.0
        low, high = (0.0 if zero and high >= 0 else low - room), high + room
    margin = (high - low) * pad
    bottom = max(0.0, low - margin) if low >= 0 else low - margin  # what cannot be negative gets no negative axis
    return Scale(bottom, high + margin, start, end)


def ticks_of(scale: Scale, count: int = 5) -> list[float]:
    """Return the round values to label on a scale."""
    return log_ticks(scale.low, scale.high) if scale.log else linear_ticks(scale.low, scale.high, count)
