"""Looks at what training needs of this machine: packages, devices, memory, permissions, names. Changes nothing."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from paceline.cluster.machine import available_memory_bytes, read_machine, visible_gpus
from paceline.cluster.store import cache_dir, safe_name
from paceline.session.doctor.finding import NOTE, OK, WRONG, Examination, Finding
from paceline.units import format_bytes, format_sizes, plural
from paceline.version import __version__

LEAST_FILES = 1024  # open files of a process: a rank keeps its corpus, checkpoints and connections open
LEAST_ROOM_BYTES = 2**30  # on the disk of the run's directory
LEAST_MEMORY_BYTES = 2 * 2**30  # a process with torch and a small model
NEEDED = ("torch", "numpy", "safetensors")
HASHES = "blake3"
WITHOUT_IT = "not installed: checkpoints are hashed by SHA-256, and those that were hashed by it cannot be read"


def examine(folder: Path) -> Examination:
    """Return what is there for training, with runs under `folder`."""
    looks: tuple[Callable[[], list[Finding]], ...] = (
        _python, _packages, _devices, _machine, lambda: _folders(folder), _limits, _extras, _probe,
    )  # fmt: skip
    return Examination(tuple(finding for look in looks for finding in look()))


def _python() -> list[Finding]:
    here = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    state = OK if sys.platform == "linux" else NOTE
    told = [Finding("python", state, here, "" if state == OK else "Linux: nothing else is tested")]
    return [*told, Finding("paceline", OK, f"{__version__} in {Path(__file__).parents[2]}")]


def _packages() -> list[Finding]:
    found = []
    for name in NEEDED:
        version = _version_of(name)
        if version:
            found.append(Finding(name, OK, version))
        else:
            found.append(Finding(name, WRONG, "not installed", "pip install paceline, which brings it"))
    version = _version_of(HASHES)
    fix = "" if version else f"pip install {HASHES}"
    return [*found, Finding(HASHES, OK if version else NOTE, version or WITHOUT_IT, fix)]


def _devices() -> list[Finding]:
    """Return what torch can compute on and how processes would talk to each other."""
    if not _version_of("torch"):
        return []
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a library of it cannot be loaded
        return [Finding("torch", WRONG, f"cannot be imported: {error}", "install torch again: https://pytorch.org")]
    gpus = visible_gpus()
    found = []
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
        names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}))
        found.append(Finding("cuda", OK, f"{torch.version.cuda}, {plural(torch.cuda.device_count(), 'GPU')}: {names}"))
        fix = "" if nccl else "a torch that is built with NCCL: several GPUs need it"
        found.append(Finding("nccl", OK if nccl else NOTE, nccl or "not in this torch", fix))
    elif gpus:
        built = torch.version.cuda
        because = f"torch cannot use them: it is built {f'for CUDA {built}' if built else 'without CUDA'}"
        fix = "a torch that is built for the driver's CUDA: https://pytorch.org/get-started"
        found.append(Finding("cuda", NOTE, f"the driver reports {plural(len(gpus), 'GPU')}, and {because}", fix))
    else:
        found.append(Finding("cuda", OK, "no GPU here: runs are on the CPU"))
    if dist.is_available() and dist.is_gloo_available():
        found.append(_loopback())
    else:
        found.append(Finding("gloo", WRONG, "not in this torch", "a torch of pytorch.org: several processes need it"))
    return found


def _loopback() -> Finding:
    """Return whether processes of this machine can find each other, as gloo does: by the host's name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.create_server((address, 0)):
            return Finding("gloo", OK, f"processes meet at {name} ({address})")
    except OSError as error:
        fix = f"a line '127.0.0.1 {name}' in /etc/hosts, or GLOO_SOCKET_IFNAME=lo"
        return Finding("gloo", NOTE, f"the host's name {name} leads nowhere: {error}", fix)


def _machine() -> list[Finding]:
    machine, free = read_machine(), available_memory_bytes()
    cores = f"{machine.cores} of {os.cpu_count()} cores are this process's: {machine.processor}"
    busy = os.getloadavg()[0]
    found = [Finding("cores", OK, cores)]
    if busy > machine.cores:
        fix = "wait, or expect slower steps and forecasts that are off"
        found.append(Finding("load", NOTE, f"{busy:.1f} processes want {plural(machine.cores, 'core')}", fix))
    told = "{} free of {}".format(*format_sizes(free, machine.memory_bytes))
    small = free < LEAST_MEMORY_BYTES
    fix = f"at least {format_bytes(LEAST_MEMORY_BYTES)} for a small model" if small else ""
    return [*found, Finding("memory", NOTE if small else OK, told, fix)]


def _folders(folder: Path) -> list[Finding]:
    return [_writable("runs", folder, "run.dir, where this user may write"),
            _writable("cache", cache_dir(), "XDG_CACHE_HOME, a folder where this user may write")]  # fmt: skip


def _writable(about: str, folder: Path, fix: str) -> Finding:
    """Return whether a folder, or the nearest one above it that is there, can be written, and its room."""
    there = next(each for each in (folder.resolve(), *folder.resolve().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"0" * 4096)
    except OSError as error:
        return Finding(
            about, WRONG if about == "runs" else NOTE, f"{there} cannot be written: {error}", f"another {fix}"
        )
    room = os.statvfs(there)
    free = room.f_bavail * room.f_frsize
    small = free < LEAST_ROOM_BYTES
    return Finding(about, NOTE if small else OK, f"{there} ({format_bytes(free)} free)",
                   "free space: checkpoints take 12 bytes for each parameter" if small else "")  # fmt: skip


def _limits() -> list[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < LEAST_FILES
    told = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} for a process"
    return [Finding("open files", NOTE if few else OK, told, f"ulimit -n {LEAST_FILES}" if few else "")]


def _extras() -> list[Finding]:
    """Return which optional dependencies are there, as the package itself declares them."""
    try:
        declared = metadata.requires("paceline") or []
    except metadata.PackageNotFoundError:
        return [Finding("extras", NOTE, "unknown: paceline was not installed by pip", "pip install paceline")]
    extras: dict[str, list[str]] = {}
    for text in declared:
        match = re.match(r"([A-Za-z0-9._-]+).*extra == ['\"]([^'\"]+)['\"]", text)
        if match and match[1] != "paceline" and match[2] not in ("test", "lint", "docs", "mutants", "bench"):
            extras.setdefault(match[2], []).append(match[1])
    there = sorted(extra for extra, packages in extras.items() if all(map(_version_of, packages)))
    absent = sorted(set(extras) - set(there))
    told = f"{', '.join(there) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    return [Finding("extras", OK, told, f"pip install 'paceline[{absent[0]}]', where it is needed" if absent else "")]


def _probe() -> list[Finding]:
    host = safe_name(read_machine().name)  # a home that machines share holds those of others too
    found = [file for kind in ("cpu", "cuda") for file in (cache_dir() / "probes").glob(f"{host}-{kind}-*.json")]
    if found:
        return [Finding("probe", OK, f"{plural(len(found), 'measurement')} of this machine in {found[0].parent}")]
    return [Finding("probe", NOTE, "this machine has not been measured: forecasts assume figures", "paceline probe")]


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
