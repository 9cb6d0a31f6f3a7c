"""Stragglers: ranks that compute longer than the others, named with what their devices tell of themselves.

Of a step's time only the time in which a rank computed counts: the others wait for a slow one, so all steps look alike
from outside. That part is known on CPUs. Nothing is done about a slow rank: it is named, in a decision.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from paceline.run.loop.step import StepStats
from paceline.run.process.world import World
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.survive.health import HealthSpec

LEAST_STEPS = 4  # that a comparison is of
PHASES = ("forward_backward", "reduce")  # whose waiting is known
THERMAL = Path("/sys/class/thermal")


class Stragglers:
    """Adds up what this rank computes, and compares the ranks now and then."""

    def __init__(self, health: HealthSpec, world: World) -> None:
        self._factor, self._checks, self._world = health.straggler_factor, health.straggler_checks, world
        self._seconds, self._steps = 0.0, 0
        self._slow: dict[int, int] = {}  # rank -> comparisons in a row in which it was slow

    def add(self, stats: StepStats) -> None:
        """Add a step of this rank's, where it is known for how long it computed."""
        if stats.waiting_seconds is not None:
            self._seconds += sum(stats.seconds.get(phase, 0.0) for phase in PHASES) - stats.waiting_seconds
            self._steps += 1

    def compare(self, step: int) -> list[DecisionRecord]:
        """Return who has just become known as slow, or no longer is. Every rank calls it after the same steps."""
        if self._world.size == 1 or self._steps < LEAST_STEPS:
            return []
        told = self._world.gather((self._seconds / self._steps, device_facts()))
        self._seconds, self._steps = 0.0, 0
        return self.judged(step, [seconds for seconds, _ in told], [facts for _, facts in told])

    def judged(self, step: int, seconds: list[float], facts: list[dict[str, Any]]) -> list[DecisionRecord]:
        """Return the decisions that follow from what each rank computed in a step, in seconds."""
        found = []
        for rank, own in enumerate(seconds):
            others = statistics.median(seconds[:rank] + seconds[rank + 1 :])
            times, known = own / max(others, 1e-9), self._slow.get(rank, 0) >= self._checks
            if times < self._factor:
                if known:
                    found.append(_decision(rank, "slow", "as fast as the others", step, times, seconds, facts))
                self._slow.pop(rank, None)
                continue
            self._slow[rank] = self._slow.get(rank, 0) + 1
            if self._slow[rank] == self._checks:
                found.append(_decision(rank, "as fast as the others", "slow", step, times, seconds, facts))
        return found


def _decision(
    rank: int, before: str, after: str, step: int, times: float, seconds: list[float], facts: list[dict[str, Any]]
) -> DecisionRecord:
    evidence = {"rank": rank, "step": step, "times": times, "compute_seconds": seconds, "device": facts[rank]}
    because = f"rank {rank} computes {times:.2f} times as long in a step as the others in the median"
    return DecisionRecord("straggler", before, f"{after}; nothing is done about it", because, evidence)


def device_facts() -> dict[str, Any]:
    """Return what the machine tells of its temperature and clocks, as far as it does."""
    found: dict[str, Any] = {}
    try:
        zones = list(THERMAL.glob("thermal_zone*/temp"))
    except OSError:  # no descriptor may be left: what is told beside the numbers must not end a run
        zones = []
    temperatures = [value / 1000 for path in zones if (value := _number(path)) is not None]
    if temperatures:
        found["hottest_celsius"] = max(temperatures)
    clocks = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    now, most = _number(clocks / "scaling_cur_freq"), _number(clocks / "cpuinfo_max_freq")
    if now is not None and most:
        found["clock_of_highest"] = now / most
    return found


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # not every zone can be read at every moment
        return None
