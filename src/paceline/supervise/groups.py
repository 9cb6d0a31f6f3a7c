"""Process groups: a rank with all that it has started (loaders, compilers), of which nothing outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from paceline.patience import Patience

LEFT_SECONDS = 5.0  # for what a rank leaves behind to end by itself, after it is asked to
POLL_SECONDS = 0.05
# Or sets of names would have an order of their own on each rank, and in each start.
HASHES_ALIKE = {"PYTHONHASHSEED": "0"}


class Process(Protocol):
    """What a supervisor asks of a process that leads a group: a `subprocess.Popen`, or one that was forked."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


@runtime_checkable
class Far(Process, Protocol):
    """A process on another machine: who is there does to it what is asked for."""

    is_near: bool
    lost_with: str  # what is the matter with its machine, where that is lost

    def signal(self, number: int, group: bool) -> None: ...

    def end(self) -> None: ...


def ending_of(process: Process) -> int | None:
    """Return how a process ended (minus the signal that ended it), or None while it runs, and do not collect it.

    Until it is collected, its number and its group's are nobody else's.
    """
    if process.returncode is not None or not hasattr(os, "waitid") or not getattr(process, "is_child", True):
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def has_ended(pid: int) -> bool:
    """Return whether a process has ended and is not collected yet, where the system lists its processes."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return False


def signal_process(process: Process, number: int) -> None:
    """Send a signal to a process alone, unless it is collected. Its children go on until the process deals with that.

    Nobody is asked whether the process runs. Signal handlers call this, in the middle of anything: a standby's word
    that was read here would be waited for, for ever, by who was about to read it.
    """
    if isinstance(process, Far):
        process.signal(number, group=False)
    elif process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def kill_group(process: Process) -> None:
    """End a process and all that it has started by force."""
    if isinstance(process, Far):
        process.signal(signal.SIGKILL, group=True)
        return
    signal_group(process, signal.SIGKILL)
    if ending_of(process) is None:  # a fork that has not made its group yet
        os.kill(process.pid, signal.SIGKILL)


def signal_group(process: Process, number: int) -> None:
    """Send a signal to all that is left of the group of a process that is not collected yet."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(process.pid, number)


def collect(processes: Sequence[Process]) -> None:
    """End what is left of the groups, first by asking, and collect the processes. None of them runs afterwards."""
    far = [process for process in processes if isinstance(process, Far)]
    for process in far:
        process.end()
    _collect_near([process for process in processes if not isinstance(process, Far)])
    for process in far:
        process.wait()


def _collect_near(processes: Sequence[Process]) -> None:
    for process in processes:
        if ending_of(process) is None:
            kill_group(process)
        else:
            signal_group(process, signal.SIGTERM)
    _wait_for({process.pid for process in processes})
    for process in processes:
        signal_group(process, signal.SIGKILL)
    _wait_for({process.pid for process in processes})  # killed is not gone: the system takes a moment
    for process in processes:
        process.wait()


def end_own_group(supervisor: int) -> None:
    """End all that this process has started, and this process too, where its supervisor is gone: nobody else will."""
    if os.getppid() != supervisor and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _wait_for(groups: set[int]) -> None:
    """Return when no member of the groups runs, or after a while."""
    patience = Patience(LEFT_SECONDS)
    while _any_runs(groups) and not patience.is_over:
        time.sleep(POLL_SECONDS)


def _any_runs(groups: set[int]) -> bool:
    """Return whether a member of the groups runs, where the system lists its processes; zombies do not."""
    if sys.platform != "linux":
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) in groups and state not in "ZX":
                return True
    return False
