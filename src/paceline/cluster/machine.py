"""What this machine is, read from the operating system and the driver, without torch.

Containers matter: cores and memory are what this process may use, not what the hardware has.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SLICE = re.compile(r"\s*MIG\s+(\S+)\s+Device\s+\d+:\s+\(UUID:\s*(MIG-[^)]+)\)")
# Of the gigabytes in a slice's name: "1g.5gb" has 4.75 GiB, and of larger GPUs it may be less of what is printed.
SLICE_SHARE = 0.88
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
    """A GPU that the driver reports, or a slice of one (MIG); `memory_bytes` is 0 where it does not say.

    Slices are named as torch names them, "NVIDIA A100-SXM4-80GB MIG 1g.10gb"; their memory is read off that name.
    """

    name: str
    memory_bytes: int
    uuid: str = ""
    is_slice: bool = False
    slices: tuple[Gpu, ...] | None = None  # None: it is not cut into any


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
    """Return the NVIDIA GPUs that a new process would see, or an empty list.

    Of GPUs that are cut into slices a process sees no more than one slice, the first unless another is named.
    """
    gpus = _gpus_of_nvidia_smi() or _gpus_of_proc()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [gpu for gpu in gpus if gpu.slices is None] or _slices(gpus)[:1]
    visible = []
    for item in (part.strip() for part in chosen.split(",")):
        found = _chosen(item, gpus)
        if found is None:  # CUDA stops reading at the first that it does not know
            break
        visible.append(found)
    return visible


def _slices(gpus: Iterable[Gpu]) -> list[Gpu]:
    return [each for gpu in gpus for each in gpu.slices or ()]


def _chosen(item: str, gpus: list[Gpu]) -> Gpu | None:
    """Return the GPU of an index, of a name or its beginning (GPU-..., MIG-...); None where there is none.

    Of a GPU that is cut into slices that is the first of them.
    """
    if item.startswith("MIG-"):
        unknown = [Gpu(f"{gpus[0].name} MIG", 0, item, is_slice=True)] if gpus and not _slices(gpus) else []
        return next((each for each in (*_slices(gpus), *unknown) if each.uuid.startswith(item)), None)
    if item.isdigit():
        found = gpus[int(item)] if int(item) < len(gpus) else None
    else:
        named = [gpu for gpu in gpus if gpu.uuid] or [dataclasses.replace(gpu, uuid=item) for gpu in gpus[:1]]
        found = next((gpu for gpu in named if item.startswith("GPU-") and gpu.uuid.startswith(item)), None)
    if found is None or found.slices is None:
        return found
    return found.slices[0] if found.slices else None


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

    def answer(*arguments: str) -> list[str]:
        try:
            told = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return told.stdout.splitlines() if told.returncode == 0 else []

    form = "--format=csv,noheader,nounits"
    lines = answer("--query-gpu=name,memory.total,uuid,mig.mode.current", form)
    lines = lines or [f"{line}, " for line in answer("--query-gpu=name,memory.total,uuid", form)]  # an older driver
    rows = [[part.strip() for part in line.rsplit(",", 3)] for line in lines if line.count(",") > 2]
    cut = slices_listed(answer("-L")) if any(mode == "Enabled" for *_, mode in rows) else {}
    return [
        Gpu(name, int(size) * 2**20 if size.isdigit() else 0, uuid,
            slices=tuple(cut.get(uuid, ())) if mode == "Enabled" else None)
        for name, size, uuid, mode in rows
    ]  # fmt: skip


def slices_listed(lines: Iterable[str]) -> dict[str, list[Gpu]]:
    """Return slices by their GPU's UUID from `nvidia-smi -L`: a line of the GPU, and below it one for each slice."""
    found: dict[str, list[Gpu]] = {}
    gpu, uuid = "", ""
    for line in lines:
        if told := re.match(r"GPU \d+: (.*) \(UUID: ([^)]+)\)", line):
            gpu, uuid = told[1], told[2]
        elif told := SLICE.match(line):
            gigabytes = re.search(r"(\d+)gb", told[1])
            size = int(SLICE_SHARE * int(gigabytes[1]) * 2**30) if gigabytes else 0
            found.setdefault(uuid, []).append(Gpu(f"{gpu} MIG {told[1]}", size, told[2], is_slice=True))
    return found


def _gpus_of_proc() -> list[Gpu]:
    gpus = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        told = dict(line.partition(":")[::2] for line in _read(path).splitlines())
        if "Model" in told:
            gpus.append(Gpu(told["Model"].strip(), 0, told.get("GPU UUID", "").strip()))
    return gpus
