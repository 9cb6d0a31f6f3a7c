"""The sampler of a node: a thread of the node's first rank, which reads sensors now and then.

The first node's samples are handed to rank 0's recorder, which writes them between two steps. Every other node has a
file of its own beside the journal, one for each start: a file has one writer. Nobody waits for the thread. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from paceline.run.observe.sensors.gpu import GpuSensor
from paceline.run.observe.sensors.processes import HostSensor, ProcessSensor
from paceline.run.observe.sensors.rapl import RaplSensor
from paceline.run.observe.sensors.sensor_reading import NodeSensor, SeenRank, SensorReading
from paceline.run.observe.summed import node_sample
from paceline.run.record.lines import append_line
from paceline.spec.journal.line import line_of
from paceline.spec.journal.timing.clock import on_clock, passed_seconds
from paceline.spec.journal.watching import NodeSample
from paceline.spec.run_files import journal_folder

NODES_AT_EVERY = 16  # nodes that write each sample; of more, each writes as many fewer, so that all write no more
CLOSE_SECONDS = 2.0  # that the last sample may take
LAST_SECONDS = 1.0  # that a sample at the end covers at least


class TakesSamples(Protocol):
    """Takes the samples of one node."""

    def __call__(self, sample: NodeSample) -> None:
        """Take one sample, on the sampler's thread."""


class NodeSampler:
    """Samples a node from `start` to `close`."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[SeenRank],
        sensors: Sequence[NodeSensor],
        take: TakesSamples,
        every_seconds: float,
        nodes: int = 1,
        detail: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`nodes` is how many nodes the run has. Set `step` to how many steps are done."""
        self._name, self._ranks, self._sensors, self._take = name, [each.rank for each in ranks], sensors, take
        self._devices = tuple(dict.fromkeys(each.device for each in ranks if each.device))
        self._every, self._detail, self._clock = every_seconds, detail, clock
        self.step = 0
        self._writes_each = max(1, round(nodes / NODES_AT_EVERY))
        self._over = threading.Event()
        self._since = self._written = clock()
        self._reads = 0
        self._flagged: tuple[str, ...] = ()
        self._energy: dict[str, float] = {}  # of readings that were not written
        self._thread = threading.Thread(target=self._run, name="paceline-node", daemon=True)

    def start(self) -> None:
        """Begin: read once, so that there is something to count from."""
        self._thread.start()

    def stop(self) -> None:
        """Have the sampler end, and do not wait for that."""
        self._over.set()

    def close(self) -> None:
        """Take a last sample and end. A disk that does not answer is not waited for."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        self._read(0.0)
        while not self._over.wait(self._every):
            self.sample()
        if self._clock() - self._written >= LAST_SECONDS:
            self.sample(last=True)
        for sensor in self._sensors:
            sensor.close()

    def sample(self, last: bool = False) -> None:
        """Read all sensors, and hand over what they say where it is this node's turn, or something new stands out."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        reading = self._read(seconds)
        self._add_energy(reading)
        self._reads += 1
        covered = now - self._written
        sample = node_sample(reading, self._name, self._ranks, self.step, covered, self._detail, self._devices)
        is_due = last or self._reads % self._writes_each == 0 or self._reads == 1
        if is_due or set(sample.flagged) - set(self._flagged):
            self._written, self._flagged, self._energy = now, sample.flagged, {}
            self._take(sample)

    def _read(self, seconds: float) -> SensorReading:
        reading = SensorReading()
        for sensor in self._sensors:
            sensor.read(reading, seconds)
        return reading

    def _add_energy(self, reading: SensorReading) -> None:
        """Make the energies of a reading those since the last sample that was written."""
        for name in ("cpu_joules", "device_joules"):
            if name in reading.host:
                self._energy[name] = reading.host[name] = reading.host[name] + self._energy.get(name, 0.0)


class SamplesOfOthers:
    """Writes the samples of a node that is not the first: a file of its own, for one start of the run."""

    def __init__(self, run_dir: Path, attempt: int, node: str, group_read: bool = False) -> None:
        """A file that cannot be written costs the samples, and not the run."""
        self._attempt, self._mode = attempt, 0o640 if group_read else 0o600
        self.path = journal_folder(run_dir) / f"node-{attempt:04d}-{file_name(node)}.jsonl"

    def __call__(self, sample: NodeSample) -> None:
        """Append a sample. Where a disk does not take it, it is lost."""
        with contextlib.suppress(OSError):
            append_line(self.path, line_of(replace(sample, attempt=self._attempt)), self._mode)


class SamplesOfFirst:
    """Keeps the first node's samples until rank 0 writes them."""

    MOST = 1000  # that wait: a run that hangs for hours keeps the newest

    def __init__(self) -> None:
        self._waiting: list[tuple[float, NodeSample]] = []  # with when it was taken, in `passed_seconds`
        self._changing = threading.Lock()

    def __call__(self, sample: NodeSample) -> None:
        """Keep a sample."""
        with self._changing:
            self._waiting = [*self._waiting, (passed_seconds(), sample)][-self.MOST :]

    def taken(self) -> list[NodeSample]:
        """Return the samples that have come since the last call, at their moments by the clock as it is now."""
        if not self._waiting:
            return []
        with self._changing:
            found, self._waiting = self._waiting, []
        return [replace(sample, time=on_clock(passed)) for passed, sample in found]


def sensors_of(ranks: Sequence[SeenRank], nvml: object = None) -> list[NodeSensor]:
    """Return what reads a node with these ranks."""
    found: list[NodeSensor] = [HostSensor(), ProcessSensor(ranks), RaplSensor()]
    if any(each.device for each in ranks):
        found.append(GpuSensor(ranks, nvml))
    return found


def file_name(node: str) -> str:
    """Return a node's name as a file may have it."""
    return re.sub(r"[^\w.-]", "_", node) or "node"


def node_name() -> str:
    """Return the name of this machine."""
    return os.uname().nodename
