"""WhenSpec: the `[run.when]` table of a spec. In which hours a run trains, and by which figures they are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError
from paceline.spec.watch.alerts import minutes_of

CHEAPEST, GREENEST = "cheapest", "greenest"


@dataclass(frozen=True)
class WhenSpec(Declared, table="run.when"):
    """In which hours a run trains. Outside of them it saves, and gives its devices back."""

    window: str = option(
        "",
        "hours of the local clock, '18:00-06:00'; 'cheapest' or 'greenest': the `hours` of each day with the lowest"
        " tariff or carbon; empty: always",
    )
    hours: int = option(8, "how many hours of each day the cheapest or greenest are", minimum=1, maximum=24)
    tariff: str = option("", "US dollars per kWh: a number, or a file of hourly values (CSV or TOML)")
    carbon: str = option(
        "",
        "grams of CO2e per kWh: a number, a file of hourly values (CSV or TOML), or 'watttime:REGION' (needs"
        " WATTTIME_USER and WATTTIME_PASSWORD in the environment)",
    )
    outside: str = option(
        "wait",
        "what comes at the end of the hours, after a checkpoint: `paceline train` on one machine waits for the next"
        " ones without devices (wait), or the run ends with 75 (requeue), as others do always",
        choices=("wait", "requeue"),
    )

    def refuse_contradictions(self) -> None:
        """Raise ConfigError for hours that are none, and for hours that nothing can choose."""
        if not self.window:
            return
        figures = {CHEAPEST: ("tariff", self.tariff), GREENEST: ("carbon", self.carbon)}.get(self.window)
        if figures is None:
            first, last = minutes_of(self.window, "run.when.window")
            if first == last:
                raise ConfigError(f"run.when.window = '{self.window}'", "it has no minute", "'18:00-06:00'")
        elif not figures[1]:
            because = f"nothing says what the {figures[0]} is in which hour"
            raise ConfigError(f"run.when = '{self.window}'", because, f'run.when.{figures[0]} = "hours.csv"')
