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
    return next(iter(worth_trying(outlook, cause, fits)), None)


def worth_trying(outlook: Mapping[str, Any], cause: str, fits: bool = True) -> list[Mapping[str, Any]]:
    """Return the changes that are answers to a cause and make steps shorter, the shortest steps first."""
    now = number(outlook.get("step_seconds"))
    answers = [each for each in outlook.get("changes") or () if each.get("cause") == cause]
    known = [each for each in answers if number(each.get("step_seconds")) and (each.get("fits") or not fits)]
    shorter = [each for each in known if now is not None and each["step_seconds"] <= now * (1 - LEAST_GAIN)]
    return sorted(shorter, key=lambda each: float(each["step_seconds"]))


def promise_of(outlook: Mapping[str, Any], cause: str) -> str:
    """Return what the best change for a cause would bring by forecast, or ""."""
    best = best_change(outlook, cause, fits=True)
    if best is None:
        return ""
    return f"by forecast, with {best['text']} steps are {_times(outlook, best)} times as fast"


def cheaper_step(outlook: Mapping[str, Any]) -> str:
    """Return what would make a step compute less, and what each brings; without an outlook what it may be."""
    if not outlook.get("changes"):
        what = "plan.precision = 'bf16', plan.compile, less recompute"
        return f"more devices, or a cheaper step: {what} (`paceline plan SPEC --explain` prices them)"
    found = [f"{each['text']} ({_times(outlook, each)} times as fast)" for each in worth_trying(outlook, "cheaper")]
    return " or ".join(["more devices", *([f"by forecast {', '.join(found)}"] if found else [])])


def _times(outlook: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    return f"{outlook['step_seconds'] / change['step_seconds']:.2f}"
