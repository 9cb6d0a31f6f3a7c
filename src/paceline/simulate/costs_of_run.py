"""Costs of a run: the run simulated from what its own saves and faults have cost, to be held against what it took."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.simulate.engine import simulate_run
from paceline.simulate.failures import Cause, FailureRates
from paceline.simulate.outcome import Spread, spread
from paceline.simulate.policy import Policy
from paceline.simulate.scenario import Scenario
from paceline.units import SECONDS_PER_HOUR

RUNS = 50


@dataclass(frozen=True)
class MeasuredCosts:
    """What a run's journal says of its work, saves and faults; times in seconds, means where there are several."""

    devices: int
    work: float  # at full speed
    step: float
    every: float  # of work between two checkpoints; all of it where none was saved
    stall: float
    write: float  # from the moment a checkpoint holds until it is safe, the stall included
    detection: float  # from a fault to the end of the world that it struck
    restart: float
    restore: float
    between_faults: float
    kept: float  # share of the faults after which the run went on from memory, of a step at most before

    @property
    def scenario(self) -> Scenario:
        """The run's work on its devices, which fail at random as often as devices did in the run."""
        hours = self.between_faults / SECONDS_PER_HOUR
        cause = Cause("fault of the run", "unknown", 1 / (hours * self.devices), evicts=False)
        rates = FailureRates("measured", (cause,), f"a fault every {self.between_faults:.3g} s of the run", "measured")
        return Scenario(nodes=1, devices_per_node=self.devices, work_seconds=self.work, rates=rates)

    @property
    def policy(self) -> Policy:
        """How the run saves and comes back. A write that takes longer than an interval takes all of it here."""
        every = max(self.every, self.step)
        known = Policy(
            "as measured", every, self.stall, 0.0, restore=self.restore, detection=self.detection, restart=self.restart,
            memory_every=self.step if self.kept and self.step < every else math.inf, memory_restore=self.restore,
            memory_survives=self.kept,
        )  # fmt: skip
        write = min(max(0.0, self.write - self.stall), known.cycle.seconds)
        return Policy(**{**vars(known), "write": write})


@dataclass(frozen=True)
class Rehearsal:
    """What simulated runs with the same costs came to: wall seconds, and goodput as a share of them."""

    wall: Spread
    goodput: Spread


def rehearse(costs: MeasuredCosts, runs: int = RUNS, seed: int = 0) -> Rehearsal:
    """Return what so many runs come to whose faults come at random, as often as measured."""
    outcomes = [simulate_run(costs.scenario, costs.policy, seed, index) for index in range(runs)]
    return Rehearsal(
        spread([outcome.wall_seconds for outcome in outcomes]), spread([outcome.goodput for outcome in outcomes])
    )
