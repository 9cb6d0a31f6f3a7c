"""What the planner promises of a change: read from the outlook that a run carries along (plan/risk/outlook.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.spec.journal.record import number

LEAST_GAIN = 0.02  # of a step: forecasts tell no less apart


def best_change(outlook: Mapping[str, Any], cause: str, fits: bool = False) -> Mapping[str, object] | None:
    """Return the change that is an answer to a cause and leaves steps shortest; None where none makes them shorter.

    With `fits` what does not fit the memory is passed over.
    """
    now = number(outlook.get("step_seconds"))
    answers = [each for each in outlook.get("changes") or () if each.get("cause") == cause]
    known = [each for each in answers if number(each.get("step_seconds")) and (each.get("fits") or not fits)]
    best = min(known, key=lambda each: float(each["step_seconds"]), default=None)
    if now is None or best is None or best["step_seconds"] > now * (1 - LEAST_GAIN):
        return None
    return best


def promise_of(outlook: Mapping[str, Any], cause: str) -> str:
    """Return what the best change for a cause would bring by forecast, or ""."""
    best = best_change(outlook, cause, fits=True)
    if best is None:
        return ""
    times = outlook["step_seconds"] / best["step_seconds"]
    return f"by forecast, with {best['text']} steps are {times:.2f} times as fast"
