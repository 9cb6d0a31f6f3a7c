"""Which machine this is, whatever it is called: a machine may get another name while a run goes on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
RAM_DISK = Path("/dev/shm")
OWN = (Path("/proc/self/ns/pid"), RAM_DISK)  # what containers of a machine have each for itself


def machine_here() -> str:
    """Return what tells this boot of this machine, and this container on it, from any other.

    Its processes see each other and share their memory disk. Where the system does not tell, it is the machine's name.
    """
    try:
        boot = BOOT.read_text().strip()
    except OSError:
        return platform.node()
    told = [f"{status.st_dev}-{status.st_ino}" for path in OWN if (status := _status(path))]
    return ".".join([boot, *told])


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
