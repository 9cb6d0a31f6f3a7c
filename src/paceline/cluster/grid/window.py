"""RunWindow: the hours in which a run trains, and what they save against training at once."""

from __future__ import annotations

import datetime
import functools
import math
from dataclasses import dataclass

from paceline.cluster.grid.figures import WATTTIME, FixedFigure, GridFigures, mean_of, read_figures
from paceline.spec.watch.alerts import is_within, minutes_of
from paceline.spec.watch.when import CHEAPEST, GREENEST, WhenSpec

MINUTE_SECONDS = 60.0
YEAR_SECONDS = 366 * 86400.0
FARTHEST_SECONDS = 8 * 86400.0  # beyond which no hours are looked for
UNKNOWN = FixedFigure(math.nan, "not stated")


@dataclass(frozen=True)
class Waiting:
    """What training in a window brings: when it would end, and electricity and carbon of a kWh, against now."""

    ends: float
    ends_at_once: float
    tariff: float
    tariff_at_once: float
    carbon: float
    carbon_at_once: float


class RunWindow:
    """The hours of a spec. Without any it is always open."""

    def __init__(self, spec: WhenSpec, tariff: GridFigures, carbon: GridFigures) -> None:
        self.spec, self.tariff, self.carbon = spec, tariff, carbon
        self._figures = {CHEAPEST: tariff, GREENEST: carbon}.get(spec.window)
        self._minutes = minutes_of(spec.window, "run.when.window") if spec.window and self._figures is None else None
        self._days: dict[datetime.date, frozenset[int]] = {}

    def is_open(self, moment: float) -> bool:
        """Return whether a run trains at a moment (seconds since the epoch)."""
        local = datetime.datetime.fromtimestamp(moment)
        if self._minutes is not None:
            return is_within(local.hour * 60 + local.minute, self._minutes)
        return self._figures is None or local.hour in self._hours_of(local.date())

    def changes(self, moment: float) -> float:
        """Return when the window opens, or closes, after a moment; infinite where it never does."""
        was, later = self.is_open(moment), moment - moment % MINUTE_SECONDS
        while later < moment + FARTHEST_SECONDS:
            later += MINUTE_SECONDS
            if self.is_open(later) != was:
                return later
        return math.inf

    def waiting(self, now: float, seconds: float) -> Waiting:
        """Return what a run of so many seconds comes to in the window, and at once.

        Of a run of years its first year is looked at, hour by hour, and the others are taken to be like that.
        """
        looked = min(seconds, YEAR_SECONDS)
        parts, left, moment = [], looked, now
        while left > 0 and math.isfinite(moment):
            until = self.changes(moment)
            if self.is_open(moment):
                part = min(left, until - moment)
                parts.append((moment, moment + part))
                left -= part
            moment = until
        ends = now + (parts[-1][1] - now) * (seconds / looked) if parts and left <= 0 else math.inf
        return Waiting(ends, now + seconds, _over(self.tariff, parts), mean_of(self.tariff, now, now + looked),
                       _over(self.carbon, parts), mean_of(self.carbon, now, now + looked))  # fmt: skip

    def _hours_of(self, day: datetime.date) -> frozenset[int]:
        """Return the best hours of a day, the earlier of equal ones; all where one is unknown."""
        if day not in self._days:
            assert self._figures is not None
            began = {hour: datetime.datetime.combine(day, datetime.time(hour)).timestamp() for hour in range(24)}
            # A day on which the clock is put forward lacks an hour.
            values = {hour: self._figures.at(moment) for hour, moment in began.items()
                      if datetime.datetime.fromtimestamp(moment).hour == hour}  # fmt: skip
            known = not any(math.isnan(value) for value in values.values())
            best = sorted(values, key=lambda hour: (values[hour], hour))[: self.spec.hours] if known else range(24)
            self._days[day] = frozenset(best)
        return self._days[day]


def window_of(spec: WhenSpec) -> RunWindow:
    """Return the window of a spec, its files read. Raises ConfigError for figures that cannot be had."""
    tariff = read_figures(spec.tariff, "run.when.tariff") if spec.tariff else UNKNOWN
    if spec.carbon.startswith(WATTTIME):
        return RunWindow(spec, tariff, _asked_once(spec.carbon))
    carbon = read_figures(spec.carbon, "run.when.carbon") if spec.carbon else UNKNOWN
    return RunWindow(spec, tariff, carbon)


@functools.cache
def _asked_once(text: str) -> GridFigures:
    """Return a service's forecast, which a process asks for once: a plan looks at it more often than that."""
    from paceline.cluster.grid.watttime import watttime_figures  # with Python's HTTP client, which plans need not load

    return watttime_figures(text)


def _over(figures: GridFigures, parts: list[tuple[float, float]]) -> float:
    total = sum(ended - began for began, ended in parts)
    return sum(mean_of(figures, *part) * (part[1] - part[0]) for part in parts) / total if total else math.nan
