"""What the system says of a process (Linux): whether it runs, and how long it has computed. Torch-free."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "?"


@dataclass(frozen=True)
class ThreadSeen:
    """A thread as the system sees it: its state, and how often it has been given a core."""

    number: int
    state: str
    switches: int


def threads_of(process: int) -> list[ThreadSeen]:
    """Return the threads of a process; none where the system lists none, or the process has ended."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                found.append(_thread(int(path.name), (path / "status").read_text()))
    return found


def _thread(number: int, status: str) -> ThreadSeen:
    told = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    switches = sum(int(told.get(f"{kind}_ctxt_switches", "0")) for kind in ("voluntary", "nonvoluntary"))
    return ThreadSeen(number, told.get("State", UNKNOWN).split()[0], switches)


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
