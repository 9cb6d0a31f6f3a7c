"""A price book of the user's own: what a device-hour costs, electricity by the hour, the building, the grid.

[[prices]]
accelerator = "h100-sxm"          # a catalog's name, or "*" for any device
price_class = "contract"          # a word of your own, picked by --price-class
usd_per_device_hour = 2.10
spot_ratio = 0.35                 # of that price for runs with cluster.spot; may be left out
since = "2026-01-01"              # both may be left out
until = "2026-06-30"

[[electricity]]                   # for machines of one's own: energy costs money too
hours = "22-06"                   # of the local clock; empty: all others
usd_per_kwh = 0.12

[power]
pue = 1.25
carbon_g_per_kwh = 41
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.grid.figures import GridFigures, mean_of, read_figures
from paceline.config.build import build, document_layer
from paceline.config.document import read_document
from paceline.config.fields import option
from paceline.config.problems import Problems
from paceline.config.shape import table_of
from paceline.errors import ConfigError
from paceline.units import SECONDS_PER_HOUR

ANY = "*"
HOURS = re.compile(r"(\d{1,2})-(\d{1,2})")
DAY_SECONDS = 24 * SECONDS_PER_HOUR


@dataclass(frozen=True)
class BookPrice:
    """What a device costs an hour, while it holds."""

    accelerator: str = option(ANY, "a device's name in the catalog, or '*' for any")
    price_class: str = option("", "a word for whom or for what it holds, such as 'contract' or 'spot'")
    usd_per_device_hour: float = option(0.0, "US dollars", minimum=0.0)
    spot_ratio: float | None = option(
        None, "which part of it devices cost that may be taken away (runs with cluster.spot)", minimum=0.0, maximum=1.0
    )
    since: str = option("", "the first day on which it holds, YYYY-MM-DD; empty: always")
    until: str = option("", "the last day on which it holds, YYYY-MM-DD; empty: always")

    def holds(self, accelerator: str, price_class: str, day: datetime.date) -> bool:
        """Return whether this row is the price of a device on a day."""
        fits = self.accelerator in (ANY, accelerator) and price_class in ("", self.price_class)
        return fits and (not self.since or day >= _day(self.since)) and (not self.until or day <= _day(self.until))


@dataclass(frozen=True)
class BookTariff:
    """What electricity costs at some hours of the day."""

    hours: str = option("", "of the local clock, from-to such as '22-06'; empty: all that no other tariff has")
    usd_per_kwh: float = option(0.0, "US dollars", minimum=0.0)

    def has(self, hour: int) -> bool:
        """Return whether an hour of the day, 0 to 23, is one of its own."""
        began, ended = _hours(self.hours)
        return began <= hour < ended if began < ended else hour >= began or hour < ended


@dataclass(frozen=True)
class BookPower:
    """The building and the grid."""

    pue: float | None = option(None, "energy that the building takes for each kWh of the machines", minimum=1.0)
    carbon_g_per_kwh: float | None = option(None, "grams of CO2 equivalent of a kWh", minimum=0.0)
    carbon_hours: str = option("", "the same by the hour: a file, as run.when.carbon takes it, beside the book")
    tariff_hours: str = option("", "what a kWh costs by the hour: a file, as run.when.tariff takes it, beside the book")


@dataclass(frozen=True)
class PriceBook:
    """Prices that replace those which runs were forecast with."""

    prices: tuple[BookPrice, ...] = option((), "what devices cost an hour; of several that hold the last is taken")
    electricity: tuple[BookTariff, ...] = option((), "what electricity costs; of several with an hour the last holds")
    power: BookPower = option(factory=BookPower, doc="the building and the grid")
    tariff: GridFigures | None = None  # of power.tariff_hours, read
    carbon: GridFigures | None = None

    def carbon_g_per_kwh(self, began: float, ended: float) -> float | None:
        """Return the mean carbon intensity of a stretch of time; None where the book has none of all of it."""
        hourly = mean_of(self.carbon, began, ended) if self.carbon else math.nan
        return self.power.carbon_g_per_kwh if math.isnan(hourly) else hourly

    def usd_per_hour(self, accelerator: str, price_class: str, moment: float, is_spot: bool = False) -> float:
        """Return a device's price at a moment; NaN where the book has none. `is_spot`: the device may be taken away."""
        day = datetime.datetime.fromtimestamp(moment).date()
        fitting = [each for each in self.prices if each.holds(accelerator, price_class, day)]
        if not fitting:
            return math.nan
        ratio = fitting[-1].spot_ratio if is_spot else None
        return fitting[-1].usd_per_device_hour * (1.0 if ratio is None else ratio)

    def usd_per_kwh(self, began: float, ended: float) -> float:
        """Return the mean price of electricity over a stretch of time; 0 where the book has no tariff."""
        if self.tariff is not None:
            return mean_of(self.tariff, began, ended)
        if not self.electricity:
            return 0.0
        parts = [(seconds, self._tariff(hour)) for hour, seconds in _by_hour(began, ended)]
        total = sum(seconds for seconds, _ in parts)
        return sum(seconds * usd for seconds, usd in parts) / total if total else parts[0][1]

    def _tariff(self, hour: int) -> float:
        own = [each for each in self.electricity if each.hours and each.has(hour)]
        rest = [each for each in self.electricity if not each.hours]
        return (own or rest)[-1].usd_per_kwh if own or rest else math.nan


def read_prices(path: Path | None) -> PriceBook:
    """Return the price book in a file, an empty one for None. Raises ConfigError with file and line."""
    if path is None:
        return PriceBook()
    problems = Problems()
    table = table_of(PriceBook, "prices")
    book, _ = build(table, document_layer(table, read_document(path), problems), problems)
    problems.raise_all()
    for index, price in enumerate(book.prices, start=1):
        for text in filter(None, (price.since, price.until)):
            _checked(_day, text, f"{path}: prices[{index}]", 'a day is "YYYY-MM-DD"')
        if price.since and price.until and _day(price.until) < _day(price.since):
            because = "its last day is before its first"
            raise ConfigError(f"{path}: prices[{index}] holds on no day", because, "mend it there")
    for index, tariff in enumerate(book.electricity, start=1):
        if tariff.hours:
            because = 'hours are from-to of the day, such as "22-06", and at least one'
            _checked(_hours, tariff.hours, f"{path}: electricity[{index}]", because)
    power = book.power
    return dataclasses.replace(
        book, tariff=_figures(power.tariff_hours, path, "power.tariff_hours"),
        carbon=_figures(power.carbon_hours, path, "power.carbon_hours"),
    )  # fmt: skip


def _figures(text: str, path: Path, what: str) -> GridFigures | None:
    """Return the figures of a file beside the book; None for none."""
    if not text:
        return None
    beside = path.parent / text
    return read_figures(str(beside) if beside.is_file() else text, what)


def _checked(read: Callable[[str], object], text: str, where: str, because: str) -> None:
    try:
        read(text)
    except ValueError as error:
        raise ConfigError(f"{where} has '{text}'", because, "mend it there") from error


def _day(text: str) -> datetime.date:
    return datetime.date.fromisoformat(text)


def _hours(text: str) -> tuple[int, int]:
    found = HOURS.fullmatch(text)
    if found is None or not all(0 <= int(part) <= 24 for part in found.groups()) or found[1] == found[2]:
        raise ValueError(text)
    return int(found[1]), int(found[2])


def _by_hour(began: float, ended: float) -> Sequence[tuple[int, float]]:
    """Return the hours of the day that a stretch of time passes, with its seconds in each."""
    whole, rest = divmod(max(0.0, ended - began), DAY_SECONDS)
    seconds = dict.fromkeys(range(24), whole * SECONDS_PER_HOUR)
    moment = began
    while moment < began + rest or moment == began:
        local = datetime.datetime.fromtimestamp(moment)
        into = local.minute * 60 + local.second + local.microsecond / 1e6
        part = min(SECONDS_PER_HOUR - into, began + rest - moment)
        seconds[local.hour] += part
        if part <= 0:
            break
        moment += part
    return [(hour, part) for hour, part in seconds.items() if part > 0] or [
        (datetime.datetime.fromtimestamp(began).hour, 1.0)
    ]
