"""What this machine is, read from the operating system and the driver, without torch.

Containers matter: cores and memory are what this process may use, not what the hardware has.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

CGROUP_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


@dataclass(frozen=True)
class Machine:
    """The machine as this process may use it."""

    name: str
    processor: str
    cores: int
    memory_bytes: int


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver reports; `memory_bytes` is 0 where it does not say."""

    name: str
    memory_bytes: int


def read_machine() -> Machine:
    """Return this machine's name, processor, usable cores and usable memory."""
    return Machine(platform.node(), _processor(), usable_cores(), usable_memory_bytes())


def threads_per_device(cores: int, devices: int) -> int:
    """Return each device's share of the cores, at least one."""
    return max(1, cores // devices)


def usable_cores() -> int:
    """Return the cores this process may run on: the affinity mask, cut by a cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders():
        quota = _read(folder / "cpu.max").split()  # version 2: "QUOTA PERIOD", or "max PERIOD"
        if not quota:  # version 1
            quota = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
            cores = min(cores, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return cores


def usable_memory_bytes() -> int:
    """Return the memory this process may use: all of the machine's, cut by a cgroup's limit."""
    total = 0
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    if not total:  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroup_folders():
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(folder / name).strip()
            if limit.isdigit():
                total = min(total, int(limit))
    return total


def available_memory_bytes() -> int:
    """Return the memory that is free for this process, or could be at once: the machine's, cut by a cgroup's limit."""
    free = usable_memory_bytes()
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) * 1024)
    for folder in _cgroup_folders():
        for limit_name, used_name in CGROUP_MEMORY:
            limit, used = (_read(folder / name).strip() for name in (limit_name, used_name))
            if limit.isdigit() and used.isdigit():
                free = min(free, max(0, int(limit) - int(used)))
    return free


def visible_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that a new process would see, or an empty list."""
    gpus = _gpus_of_nvidia_smi() or _gpus_of_proc()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    # CUDA stops reading at the first index that it does not know; names (GPU-..., MIG-...) count as one device each.
    visible = []
    for item in (part.strip() for part in chosen.split(",")):
        if item.isdigit() and int(item) < len(gpus):
            visible.append(gpus[int(item)])
        elif item.startswith(("GPU-", "MIG-")) and gpus:
            visible.append(gpus[0])
        else:
            break
    return visible


def torch_without_cuda() -> bool:
    """Return whether the installed torch is a CPU-only build, judged by its version, without importing it."""
    from importlib import metadata

    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _processor() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _cgroup_folders() -> list[Path]:
    """Return the folders whose limits bind this process: its own cgroup and all above it, both cgroup versions."""
    root = Path("/sys/fs/cgroup")
    folders = [root, root / "memory", root / "cpu"]
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        bases = [root / name for name in controllers.split(",") if name] or [root]
        for base in bases:
            own = base / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if root in parent.parents)]
    return list(dict.fromkeys(folders))


def _read(path: Path) -> str:
    """Return a small system file's text, or nothing where this system has no such file or hides it."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _gpus_of_nvidia_smi() -> list[Gpu]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    import subprocess  # where there is something to ask

    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    gpus = []
    for line in answer.stdout.splitlines() if answer.returncode == 0 else []:
        name, _, mebibytes = line.rpartition(",")
        gpus.append(Gpu(name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdigit() else 0))
    return gpus


def _gpus_of_proc() -> list[Gpu]:
    gpus = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in _read(path).splitlines():
            if line.startswith("Model:"):
                gpus.append(Gpu(line.partition(":")[2].strip(), 0))
    return gpus
