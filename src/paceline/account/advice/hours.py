"""Advice on hours: the same run in the hours of a day whose grid emits least, or whose electricity is cheapest."""

from __future__ import annotations

import math

from paceline.account.advice.advice import AdviceEvidence, CostAdvice
from paceline.cluster.grid.figures import WATTTIME
from paceline.cluster.grid.window import Waiting, window_of
from paceline.errors import ConfigError
from paceline.history.records import number, table, text
from paceline.spec.watch.when import CHEAPEST, GREENEST, WhenSpec

LEAST = 0.02  # of the carbon or the electricity, below which other hours are as good


def other_hours(evidence: AdviceEvidence) -> CostAdvice | None:
    """Return which hours the spec's own hourly figures say are better; None of a run that keeps to hours, or has none.

    A file of figures that is not where the report is made says nothing.
    """
    when = table(table(evidence.start.spec.get("run")).get("when"))
    hours = int(number(when.get("hours")) or WhenSpec().hours)
    if text(when.get("window")):
        return None
    carbon, tariff = text(when.get("carbon")), text(when.get("tariff"))
    for window, stated in ((GREENEST, carbon), (CHEAPEST, tariff)):
        if not stated or stated.startswith(WATTTIME):
            continue
        is_green = window == GREENEST
        tried = WhenSpec(window, hours, carbon=stated) if is_green else WhenSpec(window, hours, tariff=stated)
        found = _waited(evidence, tried)
        if found is not None and (advice := _told(evidence, found, window, hours)) is not None:
            return advice
    return None


def _waited(evidence: AdviceEvidence, when: WhenSpec) -> Waiting | None:
    began, seconds = evidence.start.time, evidence.goodput.wall_seconds
    if began is None or seconds <= 0:
        return None
    try:
        return window_of(when).waiting(began, seconds)
    except ConfigError:
        return None


def _told(evidence: AdviceEvidence, found: Waiting, window: str, hours: int) -> CostAdvice | None:
    green = window == GREENEST
    here, there = (found.carbon_at_once, found.carbon) if green else (found.tariff_at_once, found.tariff)
    if not (math.isfinite(here) and math.isfinite(there)) or here <= 0 or 1 - there / here < LEAST:
        return None
    unit, of = ("g/kWh", "carbon") if green else ("USD/kWh", "usd")
    saves = 1 - there / here
    if not green:  # electricity is a part of what a run costs
        spent = evidence.spent["usd"]
        if not spent:
            return None
        saves = min(1.0, evidence.spent["kwh"] * (here - there) / spent)
    what = "emits" if green else "costs"
    told = f"electricity {what} {here:.3g} {unit} in the hours of the run, and {there:.3g} in the {window} {hours}"
    return CostAdvice(
        "hours", told, f'run.when = "{window}"', of, saves, "likely",
        "by the spec's own hourly figures; the run would end later, and waits without devices",
    )  # fmt: skip
