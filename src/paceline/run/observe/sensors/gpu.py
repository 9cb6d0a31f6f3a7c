"""What NVIDIA's management library tells of the GPUs of this node's ranks (package nvidia-ml-py, module pynvml).

A library that is missing, a device that has gone, a number that may not be read: each is absent with its reason, and
what has gone is looked for again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from paceline.run.observe.sensors.sensor_reading import RisingCounter, SeenRank, SensorReading, share_of

MILLI = 1e-3
MEGA = 1e6
AGAIN_SECONDS = 60.0  # after which a driver or a device that was gone is looked for again
MOST_WATTS = 5000.0
# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h): what cuts clocks beyond the power that is allowed.
HARDWARE_SLOWDOWN, SOFTWARE_THERMAL, HARDWARE_THERMAL, POWER_BRAKE, POWER_CAP = 0x8, 0x20, 0x40, 0x80, 0x4
THROTTLED = HARDWARE_SLOWDOWN | SOFTWARE_THERMAL | HARDWARE_THERMAL | POWER_BRAKE
NOT_INSTALLED = "nvidia-ml-py is not installed: pip install 'paceline[nvidia]'"


class _GoneError(Exception):
    """A device, or its driver, is there no more."""


class GpuSensor:
    """Reads the GPUs of ranks. `nvml` is the library, as the module pynvml has it; None imports that."""

    def __init__(self, ranks: Sequence[SeenRank], nvml: Any = None) -> None:
        self._ranks, self._nvml = [each for each in ranks if each.device], nvml
        self._handles: dict[int, Any] = {}
        self._energy: dict[int, RisingCounter] = {}
        self._gone: dict[int, tuple[str, float]] = {}  # by rank: why it cannot be read, and for how long
        self._is_open, self._because, self._waited = False, "", AGAIN_SECONDS

    def read(self, into: SensorReading, seconds: float) -> None:
        """Add each rank's temperature, power, clocks, use, memory, throttling, and the energy since the last call."""
        if not self._ranks:
            return
        if not self._opened(seconds):
            into.lacks("gpu", self._because)
            return
        joules: dict[str, float | None] = {}  # by device: ranks may share one, which takes its energy once
        for each in self._ranks:
            joules[each.device] = self._read_one(each, into, seconds)
        known = [part for part in joules.values() if part is not None]
        if len(known) == len(joules):
            into.of_host("device_joules", sum(known))

    def close(self) -> None:
        """Leave the library."""
        if self._is_open:
            self._is_open = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:  # the driver may have gone before
                self._handles.clear()

    def _opened(self, seconds: float) -> bool:
        """Return whether the library answers; one that did not is asked again now and then."""
        if self._is_open:
            return True
        self._waited += seconds
        if self._waited < AGAIN_SECONDS:
            return False
        self._waited = 0.0
        if self._nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError:
                self._because = NOT_INSTALLED
                return False
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self._because = f"NVIDIA's management library does not answer: {error}"
            return False
        self._is_open, self._handles, self._energy = True, {}, {}
        return True

    def _read_one(self, each: SeenRank, into: SensorReading, seconds: float) -> float | None:
        """Add what is told of one rank's device; return its energy since the last call."""
        handle = self._handle(each, into, seconds)
        if handle is None:
            return None
        try:
            return self._numbers(handle, each.rank, into, seconds)
        except _GoneError as error:
            into.lacks(f"gpu of rank {each.rank}", str(error))
            self._lose(each.rank, str(error))
            return None

    def _numbers(self, handle: Any, rank: int, into: SensorReading, seconds: float) -> float | None:
        """Add what a device tells. Raises _GoneError where it is there no more."""
        nvml = self._nvml

        def ask(name: str, work: Callable[[], float]) -> float | None:
            try:
                value = work()
            except nvml.NVMLError as error:
                into.lacks(name, f"rank {rank}'s GPU: {error}")
                if self._is_over(error):
                    raise _GoneError(str(error)) from error
                return None
            return float(value)

        into.of_rank(rank, "celsius", ask("celsius", lambda: nvml.nvmlDeviceGetTemperature(handle, 0)))
        watts = ask("watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) * MILLI)
        into.of_rank(rank, "watts", watts)
        into.of_rank(
            rank, "utilisation", ask("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        )
        used = ask("memory_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        into.of_rank(rank, "memory_bytes", used)
        total = ask("memory_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
        into.of_rank(rank, "memory_share", share_of(used, total))
        clock = ask("clock_share", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        fastest = ask("clock_share", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        into.of_rank(rank, "clock_hz", None if clock is None else clock * MEGA)
        into.of_rank(rank, "clock_share", share_of(clock, fastest))
        reasons = ask("throttled", lambda: self._reasons(handle))
        if reasons is not None:
            into.of_rank(rank, "throttled", float(bool(int(reasons) & THROTTLED)))
            into.of_rank(rank, "power_capped", float(bool(int(reasons) & POWER_CAP)))
        spent = ask("joules", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * MILLI)
        joules = None
        if spent is not None:
            counter = self._energy.setdefault(rank, RisingCounter(2**64 * MILLI))
            joules = counter.added(spent, MOST_WATTS * seconds)
        into.of_rank(rank, "joules", joules)
        return joules

    def _reasons(self, handle: Any) -> float:
        newer = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return float((newer or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))

    def _handle(self, each: SeenRank, into: SensorReading, seconds: float) -> Any:
        """Return a rank's device; None where it is gone, which is looked at again now and then."""
        if each.rank in self._gone:
            because, waited = self._gone[each.rank]
            if waited + seconds < AGAIN_SECONDS:
                self._gone[each.rank] = because, waited + seconds
                into.lacks(f"gpu of rank {each.rank}", because)
                return None
            del self._gone[each.rank]
        if each.rank not in self._handles:
            try:
                self._handles[each.rank] = self._nvml.nvmlDeviceGetHandleByUUID(each.device)
            except self._nvml.NVMLError as error:
                self._lose(each.rank, str(error))
                into.lacks(f"gpu of rank {each.rank}", str(error))
                return None
        return self._handles[each.rank]

    def _is_over(self, error: Any) -> bool:
        """Return whether an error says that the device or the driver is gone, and not one number."""
        nvml = self._nvml
        over = {
            nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_UNKNOWN,
        }  # fmt: skip
        return getattr(error, "value", None) in over

    def _lose(self, rank: int, because: str) -> None:
        self._gone[rank] = because, 0.0
        self._handles.pop(rank, None)
        self._energy.pop(rank, None)
        if len(self._gone) == len(self._ranks):  # the driver, rather than one device
            self._because, self._waited = because, 0.0
            self.close()
            self._gone.clear()
