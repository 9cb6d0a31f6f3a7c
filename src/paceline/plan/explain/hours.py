"""What training in the hours of `run.when` brings against training at once: when it ends, what it costs and emits."""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass

from paceline.cluster.grid.window import RunWindow, Waiting
from paceline.plan.planned import Planned
from paceline.spec.survive.budget import BUDGETS


@dataclass(frozen=True)
class HoursPriced:
    """The hours of a run: whether they are open, until or from when, and both ways to train with kWh of the forecast.

    `usd` is electricity alone; amounts that are unknown are NaN.
    """

    is_open: bool
    changes: float
    waiting: Waiting
    kwh: float

    @property
    def usd_saved(self) -> float:
        """Money for electricity that the hours save."""
        return self.kwh * (self.waiting.tariff_at_once - self.waiting.tariff)

    @property
    def carbon_kg_saved(self) -> float:
        """Carbon that the hours save."""
        return self.kwh * (self.waiting.carbon_at_once - self.waiting.carbon) / 1000


def priced_hours(planned: Planned, window: RunWindow, now: float | None = None) -> HoursPriced:
    """Return what the hours of a run come to, from the forecast of the whole run, begun now."""
    now = time.time() if now is None else now
    seconds, kwh = planned.forecast.run_seconds.value, planned.forecast.kwh.value
    return HoursPriced(window.is_open(now), window.changes(now), window.waiting(now, seconds), kwh)


def hours_as_data(planned: Planned, window: RunWindow, now: float | None = None) -> dict[str, object] | None:
    """Return the hours of a run as data, moments in seconds since the epoch; None where it trains at any."""
    if not planned.spec.run.when.window:
        return None
    found = priced_hours(planned, window, now)
    waiting = found.waiting
    return {
        "window": planned.spec.run.when.window, "is_open": found.is_open, "changes": found.changes,
        "ends": waiting.ends, "ends_at_once": waiting.ends_at_once,
        "usd_per_kwh": waiting.tariff, "usd_per_kwh_at_once": waiting.tariff_at_once,
        "carbon_g_per_kwh": waiting.carbon, "carbon_g_per_kwh_at_once": waiting.carbon_at_once,
        "usd_saved": found.usd_saved, "carbon_kg_saved": found.carbon_kg_saved,
    }  # fmt: skip


def hours_lines(planned: Planned, window: RunWindow, now: float | None = None) -> list[str]:
    """Return the hours of a run in two lines; nothing where it trains at any."""
    if not planned.spec.run.when.window:
        return []
    found = priced_hours(planned, window, now)
    state = "open until" if found.is_open else "closed until"
    text = f"{planned.spec.run.when.window}: {state} {day_text(found.changes)}"
    text += f"; the run would end {day_text(found.waiting.ends)}, and at once {day_text(found.waiting.ends_at_once)}"
    saved = []
    for amount, share, said in (
        (found.usd_saved, _share(found.waiting.tariff, found.waiting.tariff_at_once), "usd"),
        (found.carbon_kg_saved, _share(found.waiting.carbon, found.waiting.carbon_at_once), "kg_co2e"),
    ):
        if not math.isnan(amount):
            of = " of electricity" if said == "usd" else ""
            saved.append(f"{BUDGETS[said][2](amount)}{of} ({share:.0%})")
    saves = f"waiting saves {' and '.join(saved)}" if saved else "what waiting saves is not known: set run.when.tariff"
    return [f"hours    {text}", f"         {saves}"]


def day_text(moment: float) -> str:
    """Return a moment of the local clock."""
    if not math.isfinite(moment):
        return "never"
    try:
        return datetime.datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):  # beyond the calendar
        return "never"


def _share(there: float, here: float) -> float:
    return 1 - there / here if here else 0.0
