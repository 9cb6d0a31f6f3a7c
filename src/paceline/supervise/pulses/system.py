"""What the system says of a process (Linux): whether it runs, and how long it has computed. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

UNKNOWN = "?"


def state_of(process: int) -> str:
    """Return the state of a process as the system names it: R runs, S waits, T is stopped, D waits for a device."""
    fields = _fields(process)
    return fields[0] if fields else UNKNOWN


def state_of_thread(thread: int) -> str:
    """Return the state of a thread of this process, by the system's number of it."""
    fields = _fields(f"self/task/{thread}")
    return fields[0] if fields else UNKNOWN


def parent_of(process: int) -> int:
    """Return the process that has started a process, or who takes its place where that has ended; 0 if not known."""
    fields = _fields(process)
    return int(fields[1]) if fields else 0


def cpu_seconds(process: int) -> float:
    """Return for how long a process has computed, all its threads together; 0 where that is not known."""
    fields = _fields(process)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _fields(process: int | str) -> list[str]:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
