"""What the kernel tells of the node and of its ranks' processes: cores, memory, network, disks, temperature."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.run.observe.sensors.sensor_reading import RisingCounter, SeenRank, SensorReading, share_of, told_because

SECTOR_BYTES = 512  # in /proc/diskstats, whatever the disk
PASSED_OVER = ("loop", "ram", "dm-", "md", "zram", "sr")  # disks that are none, or that are counted by their parts


class HostSensor:
    """Reads /proc and /sys of this machine."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._proc, self._sys = proc, sys
        self._rates: dict[str, RisingCounter] = {}
        self._busy, self._all, self._throttles = RisingCounter(), RisingCounter(), RisingCounter()

    def read(self, into: SensorReading, seconds: float) -> None:
        """Add the share of the cores in use, memory, bytes a second, the hottest zone and whether clocks were cut."""
        for part in (self._cores, self._memory, self._network, self._disks, self._heat):
            part(into, seconds)

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""

    def _cores(self, into: SensorReading, seconds: float) -> None:
        try:
            line = (self._proc / "stat").read_text().split("\n", 1)[0]
            ticks = [int(each) for each in line.split()[1:9]]  # user nice system idle iowait irq softirq steal
        except (OSError, ValueError) as error:
            into.lacks("cpu_share", told_because(error, "/proc/stat"))
            return
        idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)
        into.of_host("cpu_share", share_of(self._busy.added(sum(ticks) - idle), self._all.added(sum(ticks))))

    def _memory(self, into: SensorReading, seconds: float) -> None:
        try:
            lines = [line.split() for line in (self._proc / "meminfo").read_text().splitlines()]
            found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
            into.of_host("memory_available_bytes", found["MemAvailable"])
            into.of_host("memory_bytes", found["MemTotal"])
        except (OSError, ValueError, KeyError) as error:
            into.lacks("memory_available_bytes", told_because(error, "/proc/meminfo"))

    def _network(self, into: SensorReading, seconds: float) -> None:
        try:
            lines = (self._proc / "net" / "dev").read_text().splitlines()[2:]
            cards = [(name.strip(), rest.split()) for name, _, rest in (line.partition(":") for line in lines)]
            totals = {"received": 0, "sent": 0}
            for name, words in cards:
                if name != "lo":
                    totals["received"] += int(words[0])
                    totals["sent"] += int(words[8])
        except (OSError, ValueError, IndexError) as error:
            into.lacks("received_bytes_per_second", told_because(error, "/proc/net/dev"))
            return
        self._note_rates(into, totals, seconds)

    def _disks(self, into: SensorReading, seconds: float) -> None:
        try:
            whole = {path.name for path in (self._sys / "block").iterdir() if not path.name.startswith(PASSED_OVER)}
            totals = {"read": 0, "written": 0}
            for words in (line.split() for line in (self._proc / "diskstats").read_text().splitlines()):
                if words[2] in whole:
                    totals["read"] += int(words[5]) * SECTOR_BYTES
                    totals["written"] += int(words[9]) * SECTOR_BYTES
        except (OSError, ValueError, IndexError) as error:
            into.lacks("read_bytes_per_second", told_because(error, "/proc/diskstats"))
            return
        if not whole:
            into.lacks("read_bytes_per_second", "this machine shows no disk of its own (/sys/block)")
            return
        self._note_rates(into, totals, seconds)

    def _note_rates(self, into: SensorReading, totals: dict[str, int], seconds: float) -> None:
        for name, total in totals.items():
            added = self._rates.setdefault(name, RisingCounter()).added(total)
            into.of_host(f"{name}_bytes_per_second", share_of(added, seconds))

    def _heat(self, into: SensorReading, seconds: float) -> None:
        try:
            zones = sorted((self._sys / "class" / "thermal").glob("thermal_zone*/temp"))
        except OSError:  # no descriptor may be left
            zones = []
        known = [value / 1000 for zone in zones if (value := number_in(zone)) is not None]
        if known:
            into.of_host("celsius", max(known))
        else:
            into.lacks("celsius", "this machine shows no thermal zone (/sys/class/thermal)")
        cuts = number_in(self._sys / "devices/system/cpu/cpu0/thermal_throttle/package_throttle_count")
        if cuts is not None:
            added = self._throttles.added(cuts)
            into.of_host("throttled", None if added is None else float(added > 0))


class ProcessSensor:
    """Reads what each rank's process uses."""

    def __init__(self, ranks: Sequence[SeenRank], proc: Path = Path("/proc")) -> None:
        self._ranks, self._proc = ranks, proc
        self._cpu = {each.rank: RisingCounter() for each in ranks}
        self._tick, self._page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")

    def read(self, into: SensorReading, seconds: float) -> None:
        """Add for each rank how many cores it used, and its resident memory."""
        for each in self._ranks:
            try:
                words = (self._proc / str(each.process) / "stat").read_text().rpartition(")")[2].split()
                spent = (int(words[11]) + int(words[12])) / self._tick
                resident = float(words[21])
            except (OSError, ValueError, IndexError) as error:
                into.lacks(f"rank {each.rank}", told_because(error, f"/proc/{each.process}/stat"))
                continue
            into.of_rank(each.rank, "cpu_cores", share_of(self._cpu[each.rank].added(spent), seconds))
            into.of_rank(each.rank, "resident_bytes", resident * self._page)

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


def number_in(path: Path) -> float | None:
    """Return the number that a file of the system holds, None where it cannot be read now."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # not every zone can be read at every moment
        return None
