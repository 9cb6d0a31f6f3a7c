"""Numbers for people, where units.py has no word for them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from paceline.units import (
    format_bytes,
    format_carbon,
    format_durations,
    format_energy,
    format_rate,
    format_seconds,
    format_sizes,
    format_usd,
)

UNKNOWN = "unknown"


def figure(name: str, value: float) -> str:
    """Return a machine's figure by the unit its name ends in: "8.0 GiB", "11 GB/s", "61 µs", "$0.05"."""
    if name.endswith("bytes_per_second"):
        return format_rate(value, "B")
    if name.endswith("bytes"):
        return format_bytes(value)
    if name.endswith("seconds"):
        return format_seconds(value)
    return format_usd(value) if "usd" in name else f"{value:,.6g}"


def signed_percent(ratio: float | None, digits: int = 1) -> str:
    """Return a relative difference: "+1.6%", "-2.1%", "×118" from ten times on; "unknown" for None."""
    if ratio is None:
        return UNKNOWN
    if ratio >= 9:
        return f"×{ratio + 1:,.0f}"
    return f"{ratio:+.0%}" if abs(ratio) >= 1 else f"{ratio:+.{digits}%}"


def quantity(value: float | None, unit: str) -> str:
    """Return a value with its unit: seconds, bytes, USD, kWh, grams of CO2e, or a plain number."""
    if value is None:
        return UNKNOWN
    if unit == "s":
        return format_seconds(value)
    if unit == "B":
        return format_bytes(value)
    if unit == "USD":
        return format_usd(value)
    if unit == "kWh" and abs(value) < 0.1:
        return f"{value * 1000:.3g} Wh"
    if unit == "g":
        return f"{value / 1000:.3g} kg CO2e" if value >= 1000 else f"{value:.3g} g CO2e"
    return f"{value:,.3g} {unit}".strip() if abs(value) < 1000 else f"{value:,.0f} {unit}".strip()


def quantities(values: Sequence[float | None], unit: str) -> tuple[str, ...]:
    """Return values that are compared, all in one unit where it has several; see `quantity`."""
    shared = {"s": format_durations, "B": format_sizes, "g": format_carbon, "kWh": format_energy}.get(unit)
    known = [value for value in values if value is not None]
    if shared is None or len(known) < 2:
        return tuple(quantity(value, unit) for value in values)
    told = iter(shared(*known))
    return tuple(UNKNOWN if value is None else next(told) for value in values)


def utc(moment: float | None) -> str:
    """Return seconds since the epoch as "2026-03-01 12:00:05 UTC"."""
    try:
        return UNKNOWN if moment is None else f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):  # a moment outside the calendar
        return UNKNOWN
