"""Scenario: the job that is simulated, and the machines it runs on; the same for every policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.simulate.events import causes_of
from paceline.simulate.failures import Cause, FailureRates
from paceline.units import SECONDS_PER_HOUR


@dataclass(frozen=True)
class Scenario:
    """A job of `work_seconds` at full speed on `nodes` nodes, and what can befall it.

    `micro_batches` of a step are shared by `replicas` copies of the model, each on `devices / replicas` devices, so a
    smaller job takes ceil(micro_batches / copies left) turns where the whole one takes ceil(micro_batches / replicas).
    With `horizon_seconds` the run is looked at for so long, whether or not its work is done.
    """

    nodes: int
    devices_per_node: int
    work_seconds: float
    rates: FailureRates
    replicas: int = 1
    micro_batches: int = 1
    repair_seconds: float = 86400.0
    preemption_hours_per_node: float | None = None
    preemption_notice: float = 120.0
    preemption_return: float = 3600.0
    slow_hours_per_device: float | None = None
    slow_factor: float = 1.5
    slow_detection: float = 3600.0
    horizon_seconds: float = math.inf

    @property
    def devices(self) -> int:
        """The devices that the job computes on."""
        return self.nodes * self.devices_per_node

    @property
    def causes(self) -> tuple[Cause, ...]:
        """All that can befall a device."""
        return causes_of(self.rates, self.devices_per_node, self.preemption_hours_per_node, self.slow_hours_per_device)

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between interruptions of the whole job that lose work: failures, not what is announced."""
        rate = self.rates.unexpected_per_device_hour * self.devices
        return SECONDS_PER_HOUR / rate if rate else math.inf

    @property
    def evictions_per_second(self) -> float:
        """Rate at which nodes of the whole job leave for repair."""
        rate = sum(cause.per_device_hour for cause in self.rates.causes if cause.evicts)
        return (
            (rate + (1 / self.slow_hours_per_device if self.slow_hours_per_device else 0))
            * self.devices
            / SECONDS_PER_HOUR
        )

    def replicas_on(self, nodes: int) -> int:
        """Return how many copies of the model are whole on so many nodes."""
        return min(self.replicas, nodes * self.devices_per_node * self.replicas // self.devices)

    def speed(self, replicas: int) -> float:
        """Return the speed of so many copies, 1 for all of them: the step waits for the copy with most to do."""
        if replicas == 0:
            return 0.0
        return math.ceil(self.micro_batches / self.replicas) / math.ceil(self.micro_batches / replicas)
