"""NVIDIA's management library as its Python module looks, with devices whose answers a test sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As pynvml's: `value` is the code."""

    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


@dataclass
class FakeGpu:
    """One device. `refuses` has by the name of a call the error that it raises."""

    celsius: int = 60
    milliwatts: int = 300_000
    millijoules: int = 1_000_000
    busy: int = 90
    used: int = 40 << 30
    total: int = 80 << 30
    clock: int = 1500
    fastest: int = 2000
    reasons: int = 0
    processes: dict[int, int | None] = field(default_factory=dict)  # bytes of each that computes, by its number
    refuses: dict[str, NVMLError] = field(default_factory=dict)


class FakeNvml:
    """What the sampler asks of pynvml."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_ERROR_UNINITIALIZED, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 1, 3, 4
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNKNOWN = 9, 15, 999

    def __init__(self, devices: dict[str, FakeGpu]) -> None:
        self.devices, self.opened, self.driver = devices, 0, True

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError(9, "Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        if not self.driver:
            raise NVMLError(1, "Uninitialized")
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, name: str) -> FakeGpu:
        if name not in self.devices:
            raise NVMLError(6, "Not Found")
        return self.devices[name]

    def __getattr__(self, call: str) -> Any:
        answers = {
            "nvmlDeviceGetTemperature": lambda gpu: gpu.celsius,
            "nvmlDeviceGetPowerUsage": lambda gpu: gpu.milliwatts,
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: gpu.millijoules,
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.busy),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=gpu.used, total=gpu.total),
            "nvmlDeviceGetClockInfo": lambda gpu: gpu.clock,
            "nvmlDeviceGetMaxClockInfo": lambda gpu: gpu.fastest,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: gpu.reasons,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes.items()
            ],
        }
        if call not in answers:
            raise AttributeError(call)

        def asked(gpu: FakeGpu, *more: int) -> Any:
            if not self.driver:
                raise NVMLError(9, "Driver Not Loaded")
            if call in gpu.refuses:
                raise gpu.refuses[call]
            return answers[call](gpu)

        return asked
