"""What the system says of a process (Linux): whether it runs, and how long it has computed. Torch-free."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "?"
ESTABLISHED = "01"  # of a connection, as the system's tables write it
TREE_SECONDS = 0.5  # for which a look at all processes counts


@dataclass(frozen=True)
class ThreadSeen:
    """A thread as the system sees it: its state, how often it has been given a core, and its name."""

    number: int
    state: str
    switches: int
    name: str = ""


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
    return ThreadSeen(number, told.get("State", UNKNOWN).split()[0], switches, told.get("Name", "").strip())


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


class ProcessTree:
    """Which processes others have started. All of the machine are looked at, so a look counts for a moment."""

    def __init__(self, seconds: float = TREE_SECONDS) -> None:
        self._seconds, self._looked = seconds, -float("inf")
        self._children: dict[int, list[int]] = {}

    def below(self, process: int) -> list[int]:
        """Return the processes that a process has started, and those that these have."""
        if time.monotonic() - self._looked > self._seconds:
            self._look()
        found, begun = list[int](), [process]
        while begun:
            begun = [child for parent in begun for child in self._children.get(parent, ())]
            found += begun
        return found

    def _look(self) -> None:
        self._children, self._looked = {}, time.monotonic()
        with contextlib.suppress(OSError):
            for path in Path("/proc").iterdir():
                if path.name.isdigit():
                    self._children.setdefault(parent_of(int(path.name)), []).append(int(path.name))


def waits_in_kernel(process: int) -> str:
    """Return the function of the system in which a process's main thread sleeps, or the thread of that number.

    "" or "0" where the system tells none.
    """
    try:
        return Path(f"/proc/{process}/wchan").read_text()
    except OSError:
        return ""


def queued_bytes(processes: Collection[int]) -> int | None:
    """Return how many bytes are on their way over TCP connections that processes of one machine have.

    Counted are those that were sent and not acknowledged yet, and those that came and were not read. None where the
    system does not tell all of it.
    """
    sockets, queued = set[str](), 0
    try:
        for process in processes:
            links = [str(path.readlink()) for path in _open_files(process)]
            sockets |= {link[8:-1] for link in links if link.startswith("socket:[")}
        for process in sorted(processes)[:1]:  # all are in one network
            for name in ("tcp", "tcp6"):
                for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == ESTABLISHED and fields[9] in sockets:
                        queued += sum(int(each, 16) for each in fields[4].split(":"))
    except (OSError, ValueError, IndexError):
        return None
    return queued


def _open_files(process: int) -> list[Path]:
    return [path for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]


def cpu_seconds(process: int) -> float:
    """Return for how long a process has computed, all its threads together; 0 where that is not known."""
    fields = _fields(process)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _fields(process: int | str) -> list[str]:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
