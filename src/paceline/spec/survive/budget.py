"""BudgetSpec: the `[run.budget]` table of a spec. What a run may cost over all its starts, and what comes then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.units import format_amount, format_usd

Said = Callable[[float], str]  # an amount, in the option's unit, for people

# Option -> (the amount that is counted, amounts to one of the option's unit, how the option is said)
BUDGETS: dict[str, tuple[str, float, Said]] = {
    "usd": ("usd", 1.0, format_usd),
    "kwh": ("kwh", 1.0, partial(format_amount, unit="kWh")),
    "kg_co2e": ("carbon_g", 1000.0, partial(format_amount, unit="kg CO2e")),
    "device_hours": ("device_seconds", 3600.0, partial(format_amount, unit="device-hours")),
}


@dataclass(frozen=True)
class BudgetSpec(Declared, table="run.budget"):
    """What a run may cost over all its starts. What is not set has no limit."""

    usd: float | None = option(None, "money, at the cluster's price", above=0.0)
    kwh: float | None = option(None, "energy, as the forecast's power model has it", above=0.0)
    kg_co2e: float | None = option(None, "carbon, where the region or its intensity is stated", above=0.0)
    device_hours: float | None = option(None, "hours of all devices together", above=0.0)
    warn_at: float = option(0.8, "the share of a budget at which the run says so", above=0.0, maximum=1.0)
    shared_by: str = option(
        "", "a tag of run.tags: the budget is of all runs in the folder of run.dir that have the same value of it"
    )
    at_end: str = option(
        "stop",
        "what comes when it is used up, after a checkpoint: 'stop' ends the run with 0, 'requeue' with 75",
        choices=("stop", "requeue"),
    )
    forecast: str = option(
        "refuse",
        "a run whose forecast is beyond the budget: 'refuse' to start, or 'tell' and train until it is used up",
        choices=("refuse", "tell"),
    )

    @property
    def text(self) -> str:
        """What tells this budget from the run's other one in a sentence: "" of the run's own."""
        return ""

    @property
    def limits(self) -> dict[str, float]:
        """The limit of every option that is set, in its unit."""
        return {name: value for name in BUDGETS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class SharedBudgetSpec(BudgetSpec, table="run.shared_budget"):
    """A second budget, of all runs with the same value of a tag: `shared_by` names it. It is beside the run's own."""

    @property
    def text(self) -> str:
        """Whose budget it is."""
        return f" that all runs of the same {self.shared_by} share"
