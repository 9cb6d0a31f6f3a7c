"""RankTally: adds up where a rank's steps spend their time, and lays the ranks beside each other now and then."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.run.loop.step import StepStats
from paceline.run.process.world import World
from paceline.spec.journal.kinds import RanksRecord

LEAST_STEPS = 4  # that a record is of, but for the last one of a run
TASKS = Path("/proc/self/task")
NANOSECONDS = 1e9


class RankTally:
    """Adds up a rank's steps. A record costs the ranks one exchange; nothing of it grows with their number."""

    def __init__(self, world: World) -> None:
        self._world, self._is_first_step = world, True
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._queued = queued_seconds()

    def add(self, stats: StepStats) -> None:
        """Add a step of this rank's. The first one warms up, and is left out."""
        if self._is_first_step:
            self._is_first_step = False
            self._clear()
            return
        for name, value in _parts(stats).items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._steps += 1

    def over_ranks(
        self, step: int, last: bool = False, more: Callable[[], Mapping[str, float]] = dict
    ) -> RanksRecord | None:
        """Return where steps spent their time since the last record. Every rank calls it; all return it.

        `more` gives further means since the last record.
        """
        if self._steps < (1 if last else LEAST_STEPS):
            return None
        told = self._world.gather({**self._means(), **more()})
        steps = self._steps
        self._clear()
        names = [name for name in told[0] if all(name in each for each in told)]
        spreads = {name: spread([each[name] for each in told]) for name in names}
        return RanksRecord(step, steps, len(told), self._world.device.type, spreads)

    def _means(self) -> dict[str, float]:
        found = {name: total / self._steps for name, total in self._sums.items()}
        now = queued_seconds()
        if now is not None and self._queued is not None:
            found["queued"], found["queued_here"] = (
                max(0.0, after - before) / self._steps for after, before in zip(now, self._queued, strict=True)
            )
        if "waiting" in found:  # what it waited for a core is no wait for others
            found["waiting"] = max(0.0, found["waiting"] - found.get("queued_here", 0.0))
        return found


def _parts(stats: StepStats) -> dict[str, float]:
    found = dict(stats.seconds)
    if stats.waiting_seconds is not None:
        found["waiting"] = stats.waiting_seconds
        found["computing"] = max(0.0, found["forward_backward"] + found["reduce"] - stats.waiting_seconds)
    if stats.idle_seconds is not None:
        found["idle"] = stats.idle_seconds
    if stats.awaited_seconds is not None:
        found["awaited"] = stats.awaited_seconds
    if stats.held_seconds is not None:
        found["held"] = stats.held_seconds
    return found


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the least, the median and the most of the ranks' values, and the rank of the most."""
    most = max(values)
    return {"min": min(values), "median": statistics.median(values), "max": most, "rank": values.index(most)}


def queued_seconds() -> tuple[float, float] | None:
    """Return for how long threads of this process have had work and no core so far: all of them, and this one.

    None where the kernel does not tell (/proc/PID/task/TID/schedstat: its second number).
    """
    own = _waited(Path("/proc/thread-self/schedstat"))
    if own is None:
        return None
    return sum(_waited(task / "schedstat") or 0.0 for task in TASKS.iterdir()), own


def _waited(path: Path) -> float | None:
    try:
        return int(path.read_text().split()[1]) / NANOSECONDS
    except (OSError, ValueError, IndexError):  # another kernel, no descriptor left, or a thread that has just ended
        return None
