"""What torch.cuda tells of a device's memory, with figures that a test sets, so that its readers run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

UUID = "11111111-2222-3333-4444-555555555555"
GIB = 1 << 30


@dataclass
class FakeCuda:
    """One device as this process sees it. `beside` is what the process holds beside its allocator."""

    total: int = 140 * GIB
    now: int = 0
    peak: int = 0
    reserved: int = 0
    beside: int = round(1.3 * GIB)
    others: int = 0  # that other programs hold
    retries: int = 0
    asked: int = 0  # how often the driver was

    @property
    def device(self) -> torch.device:
        """The device's name."""
        return torch.device("cuda", 0)

    def take(self, size: int) -> None:
        """Allocate tensors and free them."""
        self.peak = max(self.peak, self.now + size)
        self.reserved = max(self.reserved, self.peak)

    def installed(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        """Put this in the place of torch.cuda's functions."""

        def stats(device: Any = None) -> dict[str, Any]:
            tensors, reserved = {"current": self.now, "peak": self.peak}, {"current": self.reserved}
            return {"allocated_bytes": {"all": tensors}, "reserved_bytes": {"all": reserved},
                    "num_alloc_retries": self.retries}  # fmt: skip

        def mem_get_info(device: Any = None) -> tuple[int, int]:
            self.asked += 1
            return self.total - self.reserved - self.beside - self.others, self.total

        def reset(device: Any = None) -> None:
            self.peak = self.now

        patch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
        patch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(uuid=UUID))
        return self
