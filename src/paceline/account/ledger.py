"""The ledger of a run: device-hours, money, energy and carbon, by start, plan and kind of work.

Money is devices x hours x price; energy the devices' power by how busy the forecast says they are, times the building;
carbon is energy times the grid's intensity. Where a run's nodes have counters of energy, these take the place of the
power model (node_counters.py). `how` says where each rate is from. Time between starts is in no entry: the run held no
devices then.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.account.node_counters import MeteredRate, measured_rate, node_shares
from paceline.account.node_use import NodeUse
from paceline.account.prices import PriceBook
from paceline.account.timeline import SpentTime, stretches
from paceline.cluster.grid.figures import WATTTIME, GridFigures, mean_of, read_figures
from paceline.errors import ConfigError
from paceline.history.records import gather, number, table, text
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.rates import AMOUNTS, JOULES_PER_KWH, rate_of
from paceline.spec.journal.watching import NodeSample

OWN_BOOK = "price book"
OWN_HOURS = "by the carbon that run.when states"


@dataclass(frozen=True)
class LedgerEntry:
    """What one kind of work cost in a stretch of a run. An amount that is unknown is None."""

    run: str
    attempt: int
    began: float  # seconds since the epoch
    kind: str  # of account/timeline.py
    plan: str
    device: str
    devices: int
    device_seconds: float
    usd: float | None
    kwh: float | None
    carbon_g: float | None
    baseline_kwh: float | None  # of `kwh`, what the devices would have drawn without any work
    tags: Mapping[str, str]
    how: Mapping[str, str]  # amount -> where its rate is from
    nodes: Mapping[str, float]  # node -> the share of it, which add up to 1

    @property
    def day(self) -> str:
        """The day on which the stretch began, by the local clock."""
        return datetime.datetime.fromtimestamp(self.began).date().isoformat()


def ledger_of(
    lines: Iterable[Mapping[str, object]],
    run: str,
    book: PriceBook | None = None,
    price_class: str = "",
    samples: Sequence[NodeSample] = (),
    use: NodeUse | None = None,
) -> list[LedgerEntry]:
    """Return the entries of a run from its journal's lines, in order of time. `run` is what it is called.

    Prices of `book` hold where it has one; `price_class` picks among them. `samples` are those of all of its nodes:
    where they have counters of energy, these take the place of the power model. `use` has those of the runs beside it.
    """
    found: list[LedgerEntry] = []
    for stretch in stretches(gather(lines)):
        found += _entries(stretch, run, book or PriceBook(), price_class, samples, use)
    return found


def _entries(
    stretch: SpentTime, run: str, book: PriceBook, price_class: str, samples: Sequence[NodeSample], use: NodeUse | None
) -> Iterable[LedgerEntry]:
    held, start = stretch.held, stretch.held.start
    device = text(table(start.cluster.get("device")).get("name"))
    counted = measured_rate(samples, held.began, held.ended, held.devices, start.cluster, use)
    rates, how = _rates(start, device, book, price_class, held.began, held.ended, counted)
    baseline = _baseline(start, book, rates["kwh"])
    nodes = node_shares(samples, start, held.began, held.ended)
    for kind, seconds in stretch.seconds.items():
        if seconds > 0:
            spent = seconds * held.devices
            amounts = {name: None if rate is None else rate * spent for name, rate in rates.items()}
            yield LedgerEntry(
                run=run,
                attempt=start.attempt or 1,
                began=held.began,
                kind=kind,
                plan=start.plan_text,
                device=device,
                devices=held.devices,
                device_seconds=spent,
                tags=_tags(start),
                how=how,
                nodes=nodes,
                baseline_kwh=None if baseline is None else baseline * spent,
                **amounts,
            )


def _rates(
    start: RunStarted,
    device: str,
    book: PriceBook,
    price_class: str,
    began: float,
    ended: float,
    counted: MeteredRate | None,
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Return USD, kWh and grams per device-second of a stretch of time, and where each is from."""
    own = {name: rate_of(name, start.forecast, start.cluster, start.world_size) for name in AMOUNTS}
    (usd, of_usd), (kwh, of_kwh), (grams, of_grams) = (own[name] for name in AMOUNTS)
    building = number(table(start.cluster.get("pue")).get("value")) or 1.0
    if counted is not None:
        kwh, of_kwh = counted.kwh * building, counted.how
    if book.power.pue is not None and kwh is not None:
        kwh *= book.power.pue / building
        of_kwh = f"{of_kwh}, building by the {OWN_BOOK}"
    intensity, of_intensity = book.carbon_g_per_kwh(began, ended), OWN_BOOK
    if intensity is None:
        intensity, of_intensity = _stated_carbon(start, began, ended), OWN_HOURS
    if intensity is None and grams is not None and kwh is not None and (before := own["kwh"][0]):
        grams *= kwh / before
    elif intensity is not None:
        grams, of_grams = (None if kwh is None else kwh * intensity), of_intensity
    is_spot = table(start.spec.get("cluster")).get("spot") is True
    priced = book.usd_per_hour(device, price_class, began, is_spot)
    if not math.isnan(priced):
        usd, of_usd = priced / 3600, OWN_BOOK
    tariff = book.usd_per_kwh(began, ended)
    if math.isnan(tariff) or (tariff and kwh is None):  # the device's price alone is not what that time has cost
        usd = None
    elif tariff and kwh is not None:
        usd, of_usd = (usd or 0.0) + kwh * tariff, f"{of_usd}, and electricity" if usd else "electricity"
    rates, how = {"usd": usd, "kwh": kwh, "carbon_g": grams}, {"usd": of_usd, "kwh": of_kwh, "carbon_g": of_grams}
    return rates, {name: origin for name, origin in how.items() if rates[name] is not None}


def _baseline(start: RunStarted, book: PriceBook, kwh: float | None) -> float | None:
    """Return kWh per device-second that a device draws without any work, by the power model; at most what it drew."""
    watts = number(table(start.cluster.get("waiting_watts_per_device")).get("value"))
    if watts is None or kwh is None:
        return None
    building = book.power.pue or number(table(start.cluster.get("pue")).get("value")) or 1.0
    return min(kwh, watts * building / JOULES_PER_KWH)


def _stated_carbon(start: RunStarted, began: float, ended: float) -> float | None:
    """Return the mean carbon of a stretch of time by the run's own `run.when`, in g/kWh.

    None where it states none or the cluster's table states one, where its file is not here, and for a service's
    forecast, which is not asked again: there the forecast's rate holds.
    """
    carbon = text(table(table(start.spec.get("run")).get("when")).get("carbon"))
    if not carbon or carbon.startswith(WATTTIME) or number(table(start.spec.get("cluster")).get("carbon_g_per_kwh")):
        return None
    try:
        path = Path(carbon)
        figures = _figures(carbon, path.stat().st_mtime_ns if path.is_file() else 0)
    except ConfigError:
        return None
    found = mean_of(figures, began, ended)
    return None if math.isnan(found) else found


@functools.lru_cache(maxsize=16)
def _figures(carbon: str, changed: int) -> GridFigures:
    """Return the figures of an option, read once for all stretches; `changed` tells a file that was written since."""
    return read_figures(carbon, "run.when.carbon")


def _tags(start: RunStarted) -> dict[str, str]:
    return {str(key): text(value) for key, value in table(table(start.spec.get("run")).get("tags")).items()}
