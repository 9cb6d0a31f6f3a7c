"""Money, energy and carbon of a run: what its device-hours cost, draw and emit, with intervals, formulas and sources.

Money is devices x hours x list price; storage, network traffic and idle hours are not in it, nor what spot devices lose
when they are taken away. Energy is what the nodes draw, by how busy their devices are (cluster/catalog/power.py), times
the building's power usage effectiveness where it is stated. Carbon is energy times the grid's average intensity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.cluster.catalog.power import power_model
from paceline.plan.cost.rates import weakest
from paceline.spec.cluster import Cluster, Figure
from paceline.spec.forecast import Z80, Z95, BillTerm, Estimate, Kind, Term
from paceline.units import format_amount, format_usd

# Terms of a step in which the device does not compute: it waits for links, for other stages or for the host.
WAITING: tuple[Kind, ...] = ("collectives", "sends", "bubble", "sync", "offload", "host", "allocator", "data")
# Power that nobody has fitted: a CPU's, an owner's figure. Half-width of the 80 % interval as a ratio, by source.
POWER_RATIO = {"measured": 1.10, "published": 1.15, "assumed": 1.40}
QUANTILES = Z95 / Z80  # of the normal distribution, two-sided 95 % over 80 %: ratios are taken as log-normal


@dataclass(frozen=True)
class Draw:
    """What a device draws with its share of node and building: the ratios of the intervals, and how it is known."""

    ratio80: float
    ratio95: float
    formula: str
    source: str


def busy_share(time: Iterable[Term]) -> float:
    """Return the part of a step in which the devices compute; 1 where the step's time is unknown."""
    terms = tuple(time)
    total = math.fsum(term.value for term in terms)
    waiting = math.fsum(term.value for term in terms if term.kind in WAITING)
    return 1 - waiting / total if total > 0 and math.isfinite(total) else 1.0


def amounts(cluster: Cluster, run_seconds: Any, busy: Any) -> tuple[Any, Any, Any]:
    """Return USD, kWh and grams of CO2 equivalent of runs; `run_seconds` and `busy` are numbers or arrays of them."""
    load = cluster.watts_per_device.value
    idle = cluster.waiting_watts_per_device.value if cluster.waiting_watts_per_device else load
    pue = cluster.pue.value if cluster.pue else 1.0
    device_hours = cluster.devices * run_seconds / 3600
    kwh = device_hours * (idle + (load - idle) * busy) * pue / 1000
    return device_hours * cluster.price_usd_per_device_hour.value, kwh, kwh * cluster.carbon_g_per_kwh.value


def draw(cluster: Cluster, busy: float) -> Draw:
    """Return what is known of the power of a device that computes for a share `busy` of the time."""
    load = cluster.watts_per_device
    idle = cluster.waiting_watts_per_device or load
    watts = idle.value + (load.value - idle.value) * busy
    fitted = cluster.waiting_watts_per_device is not None and load.source == "assumed"
    model = power_model()
    ratio80 = model.ratio80 if fitted else POWER_RATIO.get(load.source, math.nan)
    ratio95 = model.ratio95 if fitted else ratio80**QUANTILES
    parts = f"{format_amount(watts)} W/device"
    if idle.value != load.value:
        both = f"{format_amount(idle.value)} waiting to {format_amount(load.value)} computing"
        parts += f" ({both}, busy {busy:.0%} of the time)"
    parts += f" x PUE {cluster.pue.value:g}" if cluster.pue else ", without the building (PUE not stated)"
    return Draw(ratio80, ratio95, parts, weakest(load.source, idle.source))


def bill(cluster: Cluster, run: Estimate, busy: float) -> tuple[BillTerm, ...]:
    """Return money, energy and carbon of a run, as terms. Values are NaN where a figure is unknown, with the reason.

    Interval ratios join in quadrature of logarithms, to either side: the run's, the power's. A price and a region's
    average are taken as they stand.
    """
    usd, kwh, grams = amounts(cluster, run.value, busy)
    price, intensity, power = cluster.price_usd_per_device_hour, cluster.carbon_g_per_kwh, draw(cluster, busy)
    usual = _Sides.of(run)
    used = _Sides(*(_joined(ratio, power.ratio80) for ratio in usual[:2]),
                  *(_joined(ratio, power.ratio95) for ratio in usual[2:]))  # fmt: skip
    count = f"{cluster.devices:,} devices x {format_amount(run.value / 3600)} h"
    spared = "storage, network and idle time not counted"
    energy = f"{count} x {power.formula}"
    money = BillTerm("money", "USD", *usual.around(usd),
                     f"{count} x {format_usd(price.value)}; {spared}", weakest(run.source, price.source))  # fmt: skip
    drawn = BillTerm("energy", "kWh", *used.around(kwh), energy, weakest(run.source, power.source))
    emitted = BillTerm("carbon", "g", *used.around(grams),
                       f"{format_amount(kwh)} kWh x {format_amount(intensity.value)} g/kWh",
                       weakest(run.source, power.source, intensity.source))  # fmt: skip
    return (
        _known(money, price),
        _known(drawn, cluster.watts_per_device),
        _known(emitted, intensity if math.isfinite(kwh) else cluster.watts_per_device),
    )


class _Sides(NamedTuple):
    """Ratios of an 80 % and a 95 % interval's ends to their middle."""

    down: float
    up: float
    down95: float
    up95: float

    @classmethod
    def of(cls, run: Estimate) -> _Sides:
        """Return the ratios of an estimate; a 95 % interval that it does not state is taken as a log-normal one's."""
        if not run.value:
            return cls(1.0, 1.0, 1.0, 1.0)
        down, up = run.value / run.low, run.high / run.value
        if math.isnan(run.low95) or math.isnan(run.high95):
            return cls(down, up, down**QUANTILES, up**QUANTILES)
        return cls(down, up, run.value / run.low95, run.high95 / run.value)

    def around(self, value: float) -> tuple[float, float, float, float, float]:
        return value, value / self.down, value * self.up, value / self.down95, value * self.up95


def _joined(*ratios: float) -> float:
    return math.exp(math.sqrt(math.fsum(math.log(ratio) ** 2 for ratio in ratios)))


def _known(term: BillTerm, figure: Figure) -> BillTerm:
    """Return the term with where its figure is from, or as unknown with the reason."""
    if math.isfinite(term.value):
        note = f"; {figure.note}" if figure.note else ""
        return BillTerm(term.name, term.unit, term.value, term.low, term.high, term.low95, term.high95,
                        term.formula + note, term.source)  # fmt: skip
    nan = math.nan
    return BillTerm(term.name, term.unit, nan, nan, nan, nan, nan, figure.note or "a figure is unknown", "unknown")
