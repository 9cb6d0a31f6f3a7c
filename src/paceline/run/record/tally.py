"""RankTally: adds up where a rank's steps spend their time, and lays the ranks beside each other now and then."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.run.loop.step import StepStats
from paceline.run.process.spread import spread_over
from paceline.run.process.world import World
from paceline.spec.journal.kinds import RanksRecord

SAVING, EVALUATING, BETWEEN = "saving", "evaluating", "between"  # what lies between two steps
SCORING = "scoring"  # passes of a step that its update is not made of
WHOLE = "whole"  # a step with those three
LEAST_STEPS = 4  # that a record is of, but for the last one of a run
TASKS, HERE = Path("/proc/self/task"), Path("/proc/thread-self/schedstat")
NANOSECONDS = 1e9


class RankTally:
    """Adds up a rank's steps. What a record costs a rank does not grow with their number (run/process/spread.py)."""

    def __init__(self, world: World) -> None:
        self._world, self._is_first_step = world, True
        self._ended_at: float | None = None
        self._names: list[str] = []  # of what any rank has told so far, the same on every rank
        self._claimed = 0.0  # seconds since the last step ended that have a name of their own
        self._within: set[str] = set()  # names of what lies within some steps
        self._queued_before: float | None = None  # this thread's seconds without a core as the step began
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, float] = dict.fromkeys((SAVING, EVALUATING, BETWEEN, *sorted(self._within)), 0.0)
        self._steps, self._shortest_wait = 0, math.inf
        self._queued = queued_seconds()

    def begins(self, data_seconds: float) -> None:
        """Note that a step begins now, after this rank has waited `data_seconds` for its batch."""
        if self._ended_at is not None:
            passed = time.perf_counter() - self._ended_at - data_seconds - self._claimed
            self._sums[BETWEEN] += max(0.0, passed)
        self._ended_at = None
        self._queued_before = _waited(HERE) if self._world.device.type == "cpu" else None

    def ended(self) -> None:
        """Note that a step ends now: time from here to `begins` is counted as time between steps."""
        self._ended_at, self._claimed = time.perf_counter(), 0.0

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Count what the block takes as `saving` or `evaluating`, and not as the loop's own."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._claimed += seconds
            self._sums[name] += seconds

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count what the block takes, within a step, under a name of its own too."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._within.add(name)
            self._sums[name] = self._sums.get(name, 0.0) + time.perf_counter() - began

    def add(self, stats: StepStats) -> None:
        """Add a step of this rank's. The first one warms up, and is left out."""
        if self._is_first_step:
            self._is_first_step = False
            self._ended_at = None  # and so is what follows it: memory is measured there, files are opened
            self._clear()
            return
        parts = _parts(stats)
        for name, value in parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._shortest_wait = min(self._shortest_wait, self._waited_beside_cores(parts))
        self._steps += 1

    def _waited_beside_cores(self, parts: Mapping[str, float]) -> float:
        """Return what this thread has waited in a step, but for a core of its own; infinity where nobody knows."""
        if "waiting" not in parts:
            return math.inf
        now = _waited(HERE)
        queued = 0.0 if now is None or self._queued_before is None else now - self._queued_before
        return max(0.0, parts["waiting"] - queued)

    def over_ranks(
        self, step: int, last: bool = False, more: Callable[[], Mapping[str, float]] = dict
    ) -> RanksRecord | None:
        """Return where steps spent their time since the last record. Every rank calls it; all return it.

        `more` gives further means since the last record.
        """
        if self._steps < (1 if last else LEAST_STEPS):
            return None
        means, world = {**self._means(), **more()}, self._world
        steps = self._steps
        self._clear()
        if world.maximum([float(any(name not in self._names for name in means))])[0]:
            self._names = world.union([*self._names, *means])
        found = zip(self._names, spread_over(world, [means.get(name) for name in self._names]), strict=True)
        spreads = {name: each.told() for name, each in found if each is not None and each.count == world.size}
        return RanksRecord(step, steps, world.size, world.device.type, spreads)

    def _means(self) -> dict[str, float]:
        found = {name: total / self._steps for name, total in self._sums.items()}
        # Of one rank: the longest parts of all ranks may be those of different ones, and add up to more than a step.
        found[WHOLE] = sum(found.get(name, 0.0) for name in ("total", SAVING, EVALUATING, BETWEEN))
        now = queued_seconds()
        if now is not None and self._queued is not None:
            found["queued"], found["queued_here"], found["queued_sending"] = (
                max(0.0, after - before) / self._steps for after, before in zip(now, self._queued, strict=True)
            )
        if math.isfinite(self._shortest_wait):
            found["waiting_least"] = self._shortest_wait
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


def queued_seconds() -> tuple[float, float, float] | None:
    """Return for how long threads of this process have had work and no core so far: all of them, this one, and those
    that send and receive for it.

    None where the kernel does not tell (/proc/PID/task/TID/schedstat: its second number).
    """
    own = _waited(HERE)
    if own is None:
        return None
    everyone = sending = 0.0
    for task in TASKS.iterdir():
        waited = _waited(task / "schedstat") or 0.0
        everyone += waited
        sending += waited if sends(task) else 0.0
    return everyone, own, sending


def sends(task: Path) -> bool:
    """Return whether a thread is one of gloo's, by the names that torch and gloo give to theirs."""
    try:
        return "gloo" in (task / "comm").read_text()
    except OSError:  # it has just ended
        return False


def _waited(path: Path) -> float | None:
    try:
        file = os.open(path, os.O_RDONLY)  # half of what Python's own files take, in every step
        try:
            return int(os.read(file, 64).split()[1]) / NANOSECONDS
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):  # another kernel, no descriptor left, or a thread that has just ended
        return None
