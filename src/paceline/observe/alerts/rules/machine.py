"""Rules of the machines: memory near its limit, a disk nearly full."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.cluster.machine import available_memory_bytes, usable_memory_bytes
from paceline.observe.alerts.rules.rule import AlertRule, Trouble
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.spec.journal.kinds import MemoryRecord, RunStarted, StepRecord
from paceline.spec.journal.record import Record, number
from paceline.spec.journal.watching import NodeSample
from paceline.units import format_bytes

BELOW = 0.03  # a share that is too high is over when it is lower by so much
LOOK_SECONDS = 5.0  # between two looks at a machine


class MemoryNear(AlertRule):
    """A device's memory in use, as a run's peak tells, or that of the machine where devices are a CPU's."""

    name = "memory"

    def __init__(self, seen: AlertSeen, host_share: Callable[[], float] | None = None) -> None:
        super().__init__(seen)
        self._host_share = host_share or host_memory_share
        self._peak, self._looked, self._share = 0.0, 0.0, 0.0
        self._shares: dict[str, float] = {}  # of the fullest device of each node, as its samples tell

    def add(self, record: Record) -> None:
        """Take a record."""
        if isinstance(record, RunStarted):
            self._peak = 0.0
        elif isinstance(record, StepRecord | MemoryRecord) and record.peak_bytes is not None:
            self._peak = max(self._peak, record.peak_bytes)
        elif isinstance(record, NodeSample):
            spread = record.signals.get("memory_share")
            share = number(spread.get("max")) if isinstance(spread, Mapping) else None
            self._shares[record.node] = share or 0.0

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return how much is in use, where that is too much."""
        limit = self.spec.memory_share - (BELOW if firing else 0.0)
        if self.seen.on_cpu or self.seen.start is None:
            if now - self._looked >= LOOK_SECONDS:
                self._looked, self._share = now, self._host_share()
            share, what = self._share, "this machine's memory"
        else:
            whole = self.seen.figure("cluster", "device", "memory_bytes", "value")
            own = self._peak / whole if whole else 0.0
            share, what = max(own, *self._shares.values(), 0.0), "a device's memory"
        if share < limit or self.seen.ended is not None:
            return None
        title = f"{share:.0%} of {what} is in use"
        evidence = {"share": share, "peak_bytes": self._peak}
        return Trouble(title, evidence, "a smaller plan.micro_batch, or plan.recompute, before it runs out")


class DiskFull(AlertRule):
    """The disk with the run's directory is nearly full."""

    name = "disk"

    def __init__(self, seen: AlertSeen, usage: Callable[[], tuple[float, float]]) -> None:
        """`usage` returns how many bytes are in use, and how many there are."""
        super().__init__(seen)
        self._usage, self._looked, self._figures = usage, 0.0, (0.0, 0.0)

    def look(self, now: float, firing: bool) -> Trouble | None:
        """Return how full the disk is, where that is too full."""
        if now - self._looked >= LOOK_SECONDS:
            self._looked, self._figures = now, self._usage()
        used, whole = self._figures
        limit = self.spec.disk_share - (BELOW if firing else 0.0)
        if not whole or used / whole < limit or self.seen.ended is not None:
            return None
        title = f"the disk of the run's directory is {used / whole:.0%} full, {format_bytes(whole - used)} are left"
        evidence = {"used_bytes": used, "bytes": whole, "share": used / whole}
        return Trouble(title, evidence, "free space, or a smaller run.keep_last: saves need room")


def host_memory_share() -> float:
    """Return the part of this machine's memory that is in use."""
    usable = usable_memory_bytes()
    return 1.0 - available_memory_bytes() / usable if usable else 0.0


def disk_usage_of(folder: Path) -> Callable[[], tuple[float, float]]:
    """Return what says how full a folder's disk is: (bytes in use, bytes); zeros where the disk does not answer."""

    def usage() -> tuple[float, float]:
        try:
            found = shutil.disk_usage(folder)
        except OSError:
            return 0.0, 0.0
        return found.total - found.free, found.total

    return usage
