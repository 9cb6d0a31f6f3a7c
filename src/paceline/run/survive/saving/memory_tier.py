"""The memory tier: checkpoints in the machine's own memory, which a killed process leaves and a lost machine does not.

They have the format of those on disk, in a folder of the RAM disk that is the user's alone. The run's directory holds
the folder's name, drawn at random: a run that is begun anew in a directory of the same name finds none. The folder
holds the run's: one whose run is gone is removed by the next start of any run of this user.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

from paceline.checkpoint.beside.stage import bytes_to_stage
from paceline.cluster.machine import available_memory_bytes
from paceline.durable import write_text
from paceline.errors import StorageError
from paceline.lock import try_lock
from paceline.run.process.world import World
from paceline.system.this_machine import RAM_DISK, machine_here
from paceline.units import format_sizes

NAME = "memory-tier.json"  # in the run's directory
PREFIX = "paceline-"
OWNER = ".run.json"  # in the folder: whose it is; locked (flock, shared) for as long as a process of the run lives
NOBODYS_SECONDS = 24 * 3600.0  # after which a folder is removed that says no owner, as earlier releases made them
HELD = 2  # checkpoints that are there at once: the newest, and the one that is being written


def memory_root(run_dir: Path) -> Path | None:
    """Return the folder in memory that holds checkpoints of the run, or None where this machine has none of it.

    A folder that is not this user's own, or that others may write to, is none.
    """
    try:
        known = json.loads((run_dir / NAME).read_text())
        name = known["folder"]
        folder = RAM_DISK / name
        status = folder.lstat()
    except (OSError, ValueError, TypeError, KeyError):
        return None
    is_name = isinstance(name, str) and name.startswith(PREFIX) and Path(name).name == name
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return folder if is_name and is_private else None


def make_memory_root(run_dir: Path) -> Path:
    """Return the run's folder in memory, made if need be. Raises StorageError where it cannot be made."""
    known = memory_root(run_dir)
    if known is not None:
        return known
    folder = RAM_DISK / f"{PREFIX}{os.getuid()}-{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700)
        owner = folder / f"{OWNER}-"
        owner.write_text(json.dumps({"run_dir": str(run_dir.absolute())}))
        held = owner.open("rb")  # until the run names the folder
        fcntl.flock(held, fcntl.LOCK_SH)
        owner.rename(folder / OWNER)
        write_text(run_dir / NAME, json.dumps({"folder": folder.name, "host": platform.node()}))
        held.close()
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise StorageError(f"cannot keep checkpoints in {RAM_DISK}", str(error), "the disk alone") from error
    return folder


def remove_memory_root(run_dir: Path) -> None:
    """Give back the memory of the run's folder, if there is one."""
    known = memory_root(run_dir)
    if known is not None:
        shutil.rmtree(known, ignore_errors=True)
        (run_dir / NAME).unlink(missing_ok=True)


def hold_memory_root(folder: Path) -> IO[bytes] | None:
    """Return what keeps other runs from removing a run's folder until it is closed; None where it has no owner."""
    try:
        held = (folder / OWNER).open("rb")
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a RAM disk without locks
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def clear_memory_roots() -> list[str]:
    """Remove this user's folders whose runs are gone, and return their names.

    A run is gone whose directory is not there, or names another folder, and of which no process holds the folder. What
    survivors of a fault brought together lives for seconds; of a killed run it may be left.
    """
    removed = []
    tiers, rescues = RAM_DISK.glob(f"{PREFIX}{os.getuid()}-*"), RAM_DISK.glob(f"{PREFIX}rescue-*")
    for folder, is_gone in [*((each, _is_nobodys) for each in tiers), *((each, _is_left) for each in rescues)]:
        with contextlib.suppress(OSError):  # it is just being made, or removed
            if is_gone(folder):
                shutil.rmtree(folder)
                removed.append(folder.name)
    return removed


def _is_old(folder: Path) -> bool:
    """Return whether a folder is this user's and nobody has written to it for long. Raises OSError."""
    status = folder.lstat()
    is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_mine and time.time() - status.st_mtime > NOBODYS_SECONDS


def _is_left(folder: Path) -> bool:
    """Return whether a rescue is old and no supervisor holds it: a clock that is set makes any look old."""
    if not _is_old(folder):
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return try_lock(descriptor) is not False
    finally:
        os.close(descriptor)


def _is_nobodys(folder: Path) -> bool:
    """Return whether no run has the folder. Raises OSError."""
    owner = folder / OWNER
    if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
        return False
    if not owner.exists():
        return _is_old(folder)
    with owner.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            run_dir = Path(json.load(file)["run_dir"])
        except (ValueError, KeyError, TypeError):
            return _is_old(folder)
        return memory_root(run_dir) != folder


def why_no_memory_tier(tensors: Mapping[str, torch.Tensor], world: World) -> str:
    """Return why a run of this state cannot keep checkpoints in memory, or "". Every rank calls it."""
    size = int(world.sum([float(bytes_to_stage(tensors))])[0])  # copies count, of which one is written: an upper bound
    machine = machine_here()
    if world.one_of_alike(machine.encode()) is None:
        (first, _), *_ = world.told_at(machine, {})[machine]
        machines = int(world.sum([float(world.rank == first)])[0])
        return f"the ranks are on {machines} machines, and each would hold a part only"
    if not RAM_DISK.is_dir():
        return f"there is no {RAM_DISK}"
    free = min(available_memory_bytes(), shutil.disk_usage(RAM_DISK).free)
    if world.share(free) < HELD * size:
        told, room = format_sizes(size, free)
        return f"{HELD} checkpoints of up to {told} do not fit into {room} of free memory"
    return ""
