"""What a device-second costs, draws and emits, by what a start has on record of its forecast and its cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

JOULES_PER_KWH = 3.6e6
AMOUNTS = ("usd", "kwh", "carbon_g")
FORECAST, FIGURE = "at the forecast's rate", "at the cluster's figure"


def rate_of(
    amount: str, forecast: Mapping[str, object], cluster: Mapping[str, Any], devices: int | None
) -> tuple[float | None, str]:
    """Return one of AMOUNTS per device-second and where it is from: the forecast's own rate, else the cluster's figure.

    The forecast's energy knows how busy the devices are. None where neither is known.
    """
    total, seconds = _value(forecast, amount), _value(forecast, "run_seconds")
    devices = devices or _number(cluster.get("devices"))
    if total is not None and seconds and devices:
        return total / (seconds * devices), FORECAST
    return _by_figure(cluster)[amount], FIGURE


def _by_figure(cluster: Mapping[str, object]) -> dict[str, float | None]:
    """Return USD, kWh and grams of CO2e per device-second from the cluster's own figures."""
    names = ("price_usd_per_device_hour", "watts_per_device", "carbon_g_per_kwh", "pue")
    price, watts, carbon, pue = (_value(cluster, name) for name in names)
    kwh = None if watts is None else watts * (pue or 1.0) / JOULES_PER_KWH
    grams = None if kwh is None or carbon is None else kwh * carbon
    return {"usd": None if price is None else price / 3600, "kwh": kwh, "carbon_g": grams}


def _value(table: Mapping[str, object], name: str) -> float | None:
    entry = table.get(name)
    return _number(entry.get("value")) if isinstance(entry, Mapping) else None


def _number(value: object) -> Any:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None
