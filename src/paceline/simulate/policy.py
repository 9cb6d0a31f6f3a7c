"""Policy: how a job saves and what it does when a node is lost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import ConfigError, suggestion
from paceline.simulate.cycle import Cycle
from paceline.units import SECONDS, parse_seconds

ON_LOSS = ("replace", "shrink")


@dataclass(frozen=True)
class Policy:
    """Seconds of saving and coming back, and what happens without a node.

    A save halts training for `stall`; what it wrote is safe `write` seconds later. `memory_every` also keeps copies in
    the memory of other hosts, which outlive an interruption with the probability `memory_survives`. `on_loss`: a lost
    node is replaced by a spare, or waited for; or the job shrinks to the copies of the model that are whole.
    """

    name: str
    every: float  # seconds of work between checkpoints
    stall: float
    write: float
    restore: float
    detection: float
    restart: float
    spares: int = 0
    on_loss: str = "replace"
    memory_every: float = math.inf
    memory_stall: float = 0.0
    memory_restore: float = 0.0
    memory_survives: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not value >= 0:
                raise ConfigError(f"policy {self.name}: {field.name} = {value}", "it cannot be negative", "0 or more")
        if not (self.every > 0 and self.memory_every > 0):
            raise ConfigError(f"policy {self.name}: saves every 0 s", "no work would be done", "every=10min")
        if self.on_loss not in ON_LOSS:
            because = f"a job can {' or '.join(ON_LOSS)}"
            raise ConfigError(
                f"policy {self.name}: on_loss = '{self.on_loss}'", because, suggestion(self.on_loss, ON_LOSS)
            )
        if self.memory_survives > 1:
            raise ConfigError(
                f"policy {self.name}: memory_survives = {self.memory_survives}", "it is a probability", "0.95"
            )
        if self.write > self.cycle.seconds:
            raise ConfigError(
                f"policy {self.name}: a checkpoint every {self.every:g} s that takes {self.write:g} s to write",
                "the next would begin before the last is written",
                f"every={math.ceil(self.write)}s or more",
            )

    @property
    def cycle(self) -> Cycle:
        """What repeats while the job runs. Between two checkpoints there is a whole number of copies in memory."""
        if not math.isfinite(self.memory_every) or self.memory_every >= self.every:
            return Cycle(self.every, 1, 0.0, self.stall, self.write)
        copies = max(1, round(self.every / self.memory_every)) if math.isfinite(self.every) else 1
        return Cycle(self.every / copies, copies, self.memory_stall, self.stall, self.write)

    @property
    def recovery(self) -> float:
        """Seconds from an unexpected failure to running again, where a node is at hand."""
        return self.detection + self.restart + self.restore


# Settings of `NAME,key=value`: fields of a policy, and how each is read.
_SETTINGS: dict[str, Callable[[str], float | int]] = {
    **dict.fromkeys(("every", "stall", "write", "restore", "detection", "restart", "memory_every"), parse_seconds),
    "memory_survives": float,
    "spares": int,
}


def split_policy(text: str) -> tuple[str, dict[str, float | int]]:
    """Return name and settings of "spares,every=30 min,spares=16". Raises ConfigError for what is no setting."""
    name, *parts = (part.strip() for part in text.split(","))
    settings: dict[str, float | int] = {}
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in _SETTINGS:
            because = "settings of a policy are key=value" if not equals else "a policy has no such setting"
            raise ConfigError(f"--policy '{text}': '{part}'", because, suggestion(key, _SETTINGS))
        try:
            settings[key] = _SETTINGS[key](value)
        except ConfigError:
            raise
        except ValueError as error:
            kind = "a whole number" if _SETTINGS[key] is int else "a number"
            raise ConfigError(f"--policy '{text}': {key} = '{value}'", f"it takes {kind}", f"{key}=1") from error
    return name, settings


def duration_text(seconds: float) -> str:
    """Return a duration in the largest unit that keeps it short, as policies are named: "30 min", "2.5 s"."""
    if not math.isfinite(seconds):
        return "never"
    unit = "h" if seconds >= 2 * SECONDS["h"] else "min" if seconds >= 2 * SECONDS["min"] else "s"
    return f"{seconds / SECONDS[unit]:.3g} {unit}"
