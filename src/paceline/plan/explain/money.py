"""What money buys and when a run is over, in words: everywhere from the same price, that of the run as it is expected.

A run as it is expected takes what failures and preemption make of it, where they are known; else it is the forecast's.
"""

from __future__ import annotations

import datetime
import math

from paceline.plan.planned import Planned
from paceline.plan.search.limits import chance_within
from paceline.units import format_count, format_seconds, format_usd

DATED_SECONDS = 3600.0  # runs from so long on have a date on which they finish


def money_text(usd: float) -> str:
    """Return an amount of money; "price unknown" where there is none."""
    if not math.isfinite(usd):
        return "price unknown"
    return format_usd(usd)


def expected_usd(planned: Planned) -> float:
    """Return what the run costs as it is expected; NaN where no price is known."""
    expected = planned.expected
    return expected.usd if math.isfinite(expected.goodput) else planned.forecast.usd.value


def bought_text(planned: Planned, usd: float) -> str:
    """Return what an amount of money buys of the task's items: "$5,000 buys 4.4 B tokens"; "" without a price."""
    items, price = planned.steps * planned.batch_samples * planned.facts.items_per_sample, expected_usd(planned)
    if not (math.isfinite(price) and price > 0):
        return ""
    unit = "token" if planned.facts.unit == "tokens" else "sample"
    return f"{money_text(usd)} buys {format_count(items * usd / price)} {unit}s"


def limit_lines(planned: Planned) -> list[str]:
    """Return how likely the run keeps its deadline and its budget, where it has them, and what the budget buys."""
    limits, forecast, expected = planned.spec.plan, planned.forecast, planned.expected
    lines = []
    time = expected.wall_seconds if math.isfinite(expected.goodput) else forecast.run_seconds
    if limits.deadline is not None:
        chance = chance_within(time, limits.deadline)
        lines.append(
            f"deadline {format_seconds(limits.deadline)}: {format_seconds(time.value)} expected, kept with {chance:.0%}"
        )
    if limits.budget_usd is not None:
        usd = expected_usd(planned)
        chance = chance_within(forecast.usd, limits.budget_usd, usd)
        bought = bought_text(planned, limits.budget_usd)
        lines.append(
            f"budget {money_text(limits.budget_usd)}: {money_text(usd)} expected, kept with {chance:.0%}"
            + (f"; {bought}" if bought else "")
        )
    elif (stated := planned.spec.run.budget.usd) is not None and (bought := bought_text(planned, stated)):
        lines.append(
            f"budget {money_text(stated)} (run.budget.usd): {money_text(expected_usd(planned))} expected; {bought}"
        )
    return lines


def finish_lines(planned: Planned, now: datetime.datetime | None = None) -> list[str]:
    """Return when the run is over if it starts now, of runs that are long enough to have a date."""
    expected = planned.expected
    time = expected.wall_seconds if math.isfinite(expected.goodput) else planned.forecast.run_seconds
    if not DATED_SECONDS <= time.value < math.inf:
        return []
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        dates = [f"{now + datetime.timedelta(seconds=seconds):%Y-%m-%d %H:%M}" for seconds in
                 (time.value, time.low, time.high)]  # fmt: skip
    except OverflowError:  # beyond the calendar
        return []
    return [f"done {dates[0]} UTC if it starts now (80 %: {dates[1]} to {dates[2]})"]


def price_lines(planned: Planned) -> list[str]:
    """Return how to state a price where none is known of a device that has one."""
    price = planned.cluster.price_usd_per_device_hour
    if math.isfinite(price.value) or planned.cluster.device.kind == "cpu":
        return []
    return ["price unknown: --set cluster.price_usd_per_device_hour=2.5, or a catalog of your own (cluster.catalog)"]
