"""What a device-second of a start costs, draws and emits, by the start's own record."""

from __future__ import annotations

from paceline.report.records import number, table
from paceline.spec.journal.kinds import RunStarted

JOULES_PER_KWH = 3.6e6
AMOUNTS = ("usd", "kwh", "carbon_g")
FORECAST, FIGURE = "at the forecast's rate", "at the cluster's figure"


def rate_of(amount: str, start: RunStarted) -> tuple[float | None, str]:
    """Return one of AMOUNTS per device-second and where it is from: the forecast's own rate, else the cluster's figure.

    The forecast's energy knows how busy the devices are.
    """
    total, seconds = (number(table(start.forecast.get(key)).get("value")) for key in (amount, "run_seconds"))
    devices = start.world_size or number(start.cluster.get("devices"))
    if total is not None and seconds and devices:
        return total / (seconds * devices), FORECAST
    return _direct_rates(start)[amount], FIGURE


def _direct_rates(start: RunStarted) -> dict[str, float | None]:
    """Return USD, kWh and grams of CO2e per device-second from the cluster's own figures."""
    price, watts, carbon, pue = (
        number(table(start.cluster.get(key)).get("value"))
        for key in ("price_usd_per_device_hour", "watts_per_device", "carbon_g_per_kwh", "pue")
    )
    kwh = None if watts is None else watts * (pue or 1.0) / JOULES_PER_KWH
    grams = None if kwh is None or carbon is None else kwh * carbon
    return {"usd": None if price is None else price / 3600, "kwh": kwh, "carbon_g": grams}
