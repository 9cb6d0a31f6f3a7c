"""The energy of processors and their memory, by the counters that Linux shows of RAPL (/sys/class/powercap)."""

from __future__ import annotations

from pathlib import Path

from paceline.run.observe.sensors.sensor_reading import RisingCounter, SensorReading, told_because

MICRO = 1e-6
MOST_WATTS = 2000.0  # of one domain: what a wrap would be that is more is a counter that has begun anew
COUNTED = ("package", "dram")  # cores and graphics are parts of the package, and `psys` is more than all of it


class RaplSensor:
    """Adds up the counters of all packages and of their memory. They wrap, within the hour on a busy server."""

    def __init__(self, folder: Path = Path("/sys/class/powercap")) -> None:
        self._folder = folder
        self._counters: dict[Path, RisingCounter] = {}

    def read(self, into: SensorReading, seconds: float) -> None:
        """Add `cpu_joules` of the time since the last call."""
        try:
            domains = sorted(path for path in self._folder.glob("intel-rapl:*") if _is_counted(path))
        except OSError as error:
            into.lacks("cpu_joules", told_because(error, self._folder))
            return
        if not domains:
            into.lacks("cpu_joules", f"this machine shows no energy counter ({self._folder})")
            return
        parts = []
        for domain in domains:
            try:
                now = float((domain / "energy_uj").read_text())
                if domain not in self._counters:
                    self._counters[domain] = RisingCounter(float((domain / "max_energy_range_uj").read_text()))
            except (OSError, ValueError) as error:  # since 2020 only root may read them, unless it is told otherwise
                into.lacks("cpu_joules", told_because(error, domain / "energy_uj"))
                self._counters.pop(domain, None)
                return
            parts.append(self._counters[domain].added(now, MOST_WATTS / MICRO * seconds))
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            into.of_host("cpu_joules", sum(known) * MICRO)

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


def _is_counted(domain: Path) -> bool:
    try:
        return (domain / "name").read_text().startswith(COUNTED)
    except OSError:
        return False
