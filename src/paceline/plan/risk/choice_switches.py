"""Switches of the choice: where a figure, varied alone, changes the choice of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec.plan import Plan

WIDEST = 4.0  # how far a figure is varied, either way


@dataclass(frozen=True)
class Switch:
    """A figure, the factor at which the choice changes, the figure's value there, and the plan that is better then.

    `gain` is what the best plan takes less than the chosen one at the factor `gain_at`, as a fraction: None where the
    chosen one does not fit there. Without a plan nothing fits.
    """

    figure: str
    factor: float
    value: str
    plan: Plan | None
    gain: float | None
    gain_at: float


@dataclass(frozen=True)
class Sensitivity:
    """Where the choice changes, and the figures that do not change it between a quarter and four times their value."""

    switches: tuple[Switch, ...]
    steady: tuple[str, ...]
