"""The file of a run directory's lock: which processes the file names, whether these live, and the same in words."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import RunInUse
from paceline.system.lock_holders import holders_of, is_stopped
from paceline.system.this_machine import machine_here

NAME = "lock"
RECORD_BYTES = 512  # one write, which readers see whole
SETTLED_NANOSECONDS = 10**9  # since a file was written, after which its times tell the next write apart


@dataclass(frozen=True)
class LockHolder:
    """Who holds a run directory, as its file says: the process that took it comes first of `processes`.

    A process is its number and when it began: [4711, "8801234"]. Numbers alone are given again.
    """

    token: str
    host: str
    started: str
    processes: tuple[tuple[int, str], ...]
    generation: int = 1
    machine: str = ""  # as `machine_here` names it: the host may be called otherwise by now

    @property
    def is_here(self) -> bool:
        """Whether its processes are this machine's, so that one can see if they live."""
        return self.host == platform.node() or (bool(self.machine) and self.machine == machine_here())


def this_process(token: str) -> LockHolder:
    """Return this process as who holds a directory from now on, by a token."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    process = os.getpid(), began_at(os.getpid())
    return LockHolder(token, platform.node(), started, (process,), machine=machine_here())


def write_holder(descriptor: int, holder: LockHolder) -> None:
    """Write who holds the directory into its open lock file. Raises OSError."""
    line = json.dumps(asdict(holder)).encode().ljust(RECORD_BYTES - 1) + b"\n"
    os.pwrite(descriptor, line, 0)
    os.ftruncate(descriptor, len(line))
    os.fsync(descriptor)  # on a file server others see it now


def state_of(path: str) -> tuple[int, ...] | None:
    """Return what changes when a file is written; None where it is not there, or was written so lately that another
    write may leave the same.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < SETTLED_NANOSECONDS:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_holder(path: Path) -> LockHolder | None:
    """Return who holds the directory, as the file says, or None where it says nothing, or something else."""
    try:
        told = json.loads(path.read_bytes())
        processes = tuple((int(process), str(began)) for process, began in told["processes"])
        generation = int(told.get("generation", 1))
        if not processes:
            return None
        machine = str(told.get("machine", ""))
        return LockHolder(told["token"], told["host"], told["started"], processes, generation, machine)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def living_here(run_dir: Path) -> LockHolder | None:
    """Return who holds the directory where that is a living process of this machine."""
    holder = read_holder(run_dir / NAME)
    return holder if holder is not None and holder.is_here and may_live(holder) else None


def moved_to(descriptor: int) -> str:
    """Return the path that an open lock file has now, where the system tells it; "" of one that was deleted.

    A file server may keep that under another name for as long as it is open.
    """
    try:
        there = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - it is no path where the file is gone
        is_kept = os.fstat(descriptor).st_nlink and Path(there).name == NAME
        return there if is_kept and os.path.exists(there) else ""  # noqa: PTH110
    except OSError:
        return ""


def identity_of(descriptor: int) -> tuple[int, int]:
    """Return what tells an open file from any other one of this machine."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def began_at(process: int) -> str:
    """Return when a process began, in the system's own count, or "" where it has ended or the system does not say.

    With the number it names a process; numbers alone are given again.
    """
    try:
        told = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if told[0] in "ZX" else told[19]


def may_live(holder: LockHolder) -> bool:
    """Return whether a process that the file names is alive, as far as this machine can tell."""
    if not holder.is_here:
        return True
    return any(_is_alive(process, began) for process, began in holder.processes)


def is_orphaned(holder: LockHolder | None) -> bool:
    """Return whether the process that took the directory, on this machine, is gone: what it has started is ending."""
    return holder is not None and holder.is_here and not _is_alive(*holder.processes[0])


def _is_alive(process: int, began: str) -> bool:
    return _is_there(process) and began_at(process) == began


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def who_holds(holder: LockHolder | None) -> str:
    """Return in words who holds a directory."""
    if not holder:
        return "another process has locked it"
    stopped = "; it is stopped by a signal" if holder.is_here and is_stopped(holder.processes[0][0]) else ""
    return f"process {holder.processes[0][0]} on {holder.host} has held it since {holder.started}{stopped}"


def in_use(run_dir: Path, holder: LockHolder | None, unlocked: bool) -> RunInUse:
    """Return the error of a directory that another run uses, with what to do about it."""
    what = f"{run_dir} is in use by another run"
    left = [str(each.process) for each in holders_of(run_dir / NAME)] if is_orphaned(holder) else []
    if left:
        are = f"process{'es' if len(left) > 1 else ''} {', '.join(left)}"
        because = f"{who_holds(holder)} and is gone, and what it has started has not ended: {are}"
        return RunInUse(what, because, f"end that (kill -KILL {' '.join(left)}), or choose another run.dir")
    wait = f"wait for it, stop it (kill -TERM {holder.processes[0][0]})" if holder else "wait for it, stop it"
    if holder and holder.is_here and is_stopped(holder.processes[0][0]):
        wait = f"let it go on (kill -CONT {holder.processes[0][0]}), {wait}"
    gone = f"; if it is gone, delete {run_dir / NAME}: this file system has no locks" if unlocked else ""
    return RunInUse(what, who_holds(holder), f"{wait}, or choose another run.dir{gone}")
