"""How much more memory this process could have."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import torch

from paceline.run.memory.on_gpu import allocator_bytes
from paceline.run.memory.spent import process_bytes
from paceline.supervise.memory_kills import own_group
from paceline.units import format_bytes


def free_bytes(device: torch.device) -> tuple[float, str]:
    """Return how many bytes more this process could have got, and what limits it; infinite where nothing is known."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        known = allocator_bytes(device)
        return float(free + known.reserved - known.now), f"the device's {format_gib(total)}"
    return min(_limits(), default=(math.inf, "nothing that is known"))


def format_gib(count: float) -> str:
    """Return bytes of a device in GiB, however many: beside its total of 140 GiB, what is missing is no 0.02 TiB."""
    return f"{count / 2**30:.3g} GiB"


def _limits() -> list[tuple[float, str]]:
    """Return what is left under each limit that a process on a CPU has."""
    status, found = process_bytes(), []
    for name, which, field in (
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY and field in status:
            found.append((float(max(0, limit - status[field])), f"the process's {name} of {format_bytes(limit)}"))
    try:
        most, now = ((own_group() / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no control group, or none that counts memory
        most = now = ""
    if most.isdigit() and now.isdigit():
        found.append((float(max(0, int(most) - int(now))), f"the control group's {format_bytes(int(most))}"))
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append((1024.0 * int(line.split()[1]), "the machine's memory"))
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # another system than Linux
        return ""
