"""GridFigures: what a kWh costs or emits at each hour. A fixed figure, a file of hourly values, a service's forecast.

Nothing is ever guessed from where this machine seems to be: a figure is stated, or it is unknown.
"""

from __future__ import annotations

import datetime
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from paceline.errors import ConfigError
from paceline.units import SECONDS_PER_HOUR

WATTTIME = "watttime:"  # before the region of a service's forecast (watttime.py)
_OF_DAY = re.compile(r"([01]?\d|2[0-3])(?::00)?")


class GridFigures(Protocol):
    """A figure of the grid in time. `source` says where it is from."""

    source: str

    def at(self, moment: float) -> float:
        """Return the figure of the hour of a moment (seconds since the epoch); NaN where it is unknown."""


class FixedFigure:
    """A figure that is the same at every hour."""

    def __init__(self, value: float, source: str) -> None:
        self._value, self.source = value, source

    def at(self, moment: float) -> float:
        """Return the figure."""
        return self._value


class HourlyFigures:
    """Values of hours: of single ones by their moment, and of hours of the day, which hold where no single one does.

    An hour that has neither has the mean of the same hour on other days.
    """

    def __init__(self, hours: Mapping[float, float], of_day: Mapping[int, float], source: str) -> None:
        """`hours` by the moment at which each begins; `of_day` by the hour of the local clock."""
        self._hours, self.source = {_begun(moment): value for moment, value in hours.items()}, source
        typical: dict[int, list[float]] = {}
        for moment, value in hours.items():
            typical.setdefault(_clock(moment).hour, []).append(value)
        self._of_day = {**{hour: _mean(values) for hour, values in typical.items()}, **of_day}

    def at(self, moment: float) -> float:
        """Return the figure of the moment's hour."""
        known = self._hours.get(_begun(moment))
        return self._of_day.get(_clock(moment).hour, math.nan) if known is None else known


def read_figures(text: str, what: str) -> GridFigures:
    """Return the figures that an option states: a number, or a file. Raises ConfigError naming the option `what`."""
    try:
        return FixedFigure(_positive(text), f"{what} = {text}")
    except ValueError:
        pass
    path = Path(text)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{what} = '{text}' cannot be read", str(error), "a number, or a file of hourly values"
        ) from error
    rows = _toml_rows(content, text, what) if path.suffix == ".toml" else _csv_rows(content)
    hours: dict[float, list[float]] = {}
    of_day: dict[int, list[float]] = {}
    for number, (when, value) in enumerate(rows, 1):
        if number == 1 and path.suffix != ".toml" and not _is_hour(when):
            continue  # the names of the columns
        try:
            if found := _OF_DAY.fullmatch(when.strip()):
                of_day.setdefault(int(found[1]), []).append(_positive(value))
            else:
                moment = datetime.datetime.fromisoformat(when.strip()).timestamp()
                hours.setdefault(_begun(moment), []).append(_positive(value))
        except (ValueError, OverflowError, OSError) as error:
            because = f"row {number} is '{when},{value}'"
            try_ = "rows of an hour (0 to 23, or 2026-11-23T18:00+01:00) and a number that is not negative"
            raise ConfigError(f"{what} = '{text}' has no hour there", because, try_) from error
    if not hours and not of_day:
        raise ConfigError(f"{what} = '{text}' has no hours", "no row of it is one", "rows such as 18,0.12")
    means = {moment: _mean(values) for moment, values in hours.items()}
    return HourlyFigures(means, {hour: _mean(values) for hour, values in of_day.items()}, f"{what} = {text}")


def mean_of(figures: GridFigures, began: float, ended: float) -> float:
    """Return the mean figure over a stretch of time; NaN where an hour of it is unknown."""
    total, moment = 0.0, began
    while moment < ended:
        until = min(ended, _begun(moment) + SECONDS_PER_HOUR)
        total += figures.at(moment) * (until - moment)
        moment = until
    return total / (ended - began) if ended > began else figures.at(began)


def _csv_rows(content: str) -> list[tuple[str, str]]:
    import csv  # every plan loads this module, and few read a file

    rows = [row for row in csv.reader(content.splitlines()) if row and not row[0].startswith("#")]
    return [(row[0], row[1] if len(row) > 1 else "") for row in rows]


def _toml_rows(content: str, text: str, what: str) -> list[tuple[str, str]]:
    """Return the rows of a TOML file: a table `hours`, of an hour and its figure."""
    try:
        found: object = tomllib.loads(content).get("hours")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} = '{text}' is no TOML", str(error), 'a table: [hours] "18" = 0.12') from error
    if not isinstance(found, dict):
        raise ConfigError(f"{what} = '{text}' has no hours", "it has no table [hours]", '[hours] "18" = 0.12')
    return [(str(when), str(value)) for when, value in found.items()]


def _is_hour(text: str) -> bool:
    """Return whether a text is an hour of the day, or a moment."""
    try:
        return _OF_DAY.fullmatch(text.strip()) is not None or bool(datetime.datetime.fromisoformat(text.strip()))
    except ValueError:
        return False


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _positive(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _clock(moment: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(moment)


def _begun(moment: float) -> float:
    """Return when the hour of a moment began; zones of half hours have theirs."""
    local = _clock(moment)
    return moment - (local.minute * 60 + local.second + local.microsecond / 1e6)
