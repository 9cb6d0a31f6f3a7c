"""Jobs and policies with round numbers, for tests of the simulation."""

from __future__ import annotations

from dataclasses import replace

from paceline.simulate.failures import Cause, FailureRates
from paceline.simulate.policy import Policy
from paceline.simulate.scenario import Scenario

HOUR, DAY = 3600.0, 86400.0


def rates(mtbf_hours_per_device: float, evicts: bool = False, planned: bool = False) -> FailureRates:
    """Return a single cause; none for an infinite mean time between failures."""
    cause = Cause("fault", "gpu", 1 / mtbf_hours_per_device, evicts=evicts, planned=planned)
    return FailureRates("round", (cause,) if cause.per_device_hour else (), "round numbers", "assumed")


def scenario(mtbf_hours: float = 6.0, work_hours: float = 100.0, **changes: object) -> Scenario:
    """Return a job on one node of one device, whose failures need no other node."""
    base = Scenario(nodes=1, devices_per_node=1, work_seconds=work_hours * HOUR, rates=rates(mtbf_hours))
    return replace(base, **changes)  # type: ignore[arg-type]


def policy(**changes: object) -> Policy:
    """Return blocking checkpoints every hour of 5 minutes each, and 10 minutes to come back."""
    base = Policy("round", every=HOUR, stall=300.0, write=0.0, restore=60.0, detection=240.0, restart=300.0)
    return replace(base, **changes)  # type: ignore[arg-type]
