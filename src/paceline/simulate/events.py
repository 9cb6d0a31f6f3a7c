"""Events: what happens to a simulated run, and where its time goes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from paceline.simulate.failures import Cause, FailureRates
from paceline.units import SECONDS_PER_HOUR

# Where the seconds of a run go. They add up to its wall time.
PRODUCTIVE = "training"  # what training would take at full speed
SAVING = "checkpoints"  # stalls for saving
LOST = "lost work"  # computed, and computed again after a failure
SLOWED = "slow devices"  # longer steps while a slow device is in the job
SHRUNK = "fewer devices"  # longer steps while the job runs on fewer copies of the model
DETECTION = "detection"
WAITING = "waiting for nodes"
RESTART = "restart"
RESTORE = "restore"
KINDS = (PRODUCTIVE, SAVING, LOST, SLOWED, SHRUNK, DETECTION, WAITING, RESTART, RESTORE)

PREEMPTION = "spot preemption"
SLOWDOWN = "silent slowdown"


@dataclass(frozen=True)
class Stretch:
    """A stretch of a simulated run: its kind, begin and end in seconds, and what there is to say of it."""

    kind: str
    begin: float
    end: float
    note: str = ""


@dataclass(frozen=True)
class Instant:
    """Something that happened at once: a failure, a node back from repair, a preemption."""

    name: str
    at: float
    note: str = ""


@dataclass(frozen=True)
class Strike:
    """One thing that befalls an active device: its time, its cause, and a draw in [0, 1) for whom it hits."""

    at: float
    cause: Cause
    draw: float


class Strikes:
    """The strikes of one run in order of time: a Poisson process that depends on the seed alone, not on any policy.

    Times are those of a job on all its devices; a smaller job is hit by those whose `draw` is below its share. So
    policies are compared under the same failures.
    """

    def __init__(self, causes: tuple[Cause, ...], devices: int, seed: str) -> None:
        self._random = random.Random(seed)
        self._causes = causes
        self._weights = [cause.per_device_hour for cause in causes]
        self._per_second = sum(self._weights) * devices / SECONDS_PER_HOUR
        self._now = 0.0

    def next(self) -> Strike | None:
        """Return the next strike; None where nothing ever happens."""
        if not self._per_second:
            return None
        self._now += self._random.expovariate(self._per_second)
        cause = self._random.choices(self._causes, self._weights)[0]
        return Strike(self._now, cause, self._random.random())


def causes_of(
    rates: FailureRates,
    devices_per_node: int,
    preemption_hours_per_node: float | None,
    slow_hours_per_device: float | None,
) -> tuple[Cause, ...]:
    """Return all that can befall a device: failures, and preemptions and slowdowns where their rates are stated."""
    causes = list(rates.causes)
    if preemption_hours_per_node is not None:
        causes.append(Cause(PREEMPTION, PREEMPTION, 1 / preemption_hours_per_node / devices_per_node))
    if slow_hours_per_device is not None:
        causes.append(Cause(SLOWDOWN, SLOWDOWN, 1 / slow_hours_per_device))
    return tuple(cause for cause in causes if cause.per_device_hour > 0)
