"""What faults do to the process in which they strike, or to its supervisor."""

from __future__ import annotations

import functools
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError
from paceline.run.survive.faults.network import disturb
from paceline.spec.journal.reading import starts_of
from paceline.spec.survive.faults import FaultSpec
from paceline.supervise.nodes.meeting import find_meeting
from paceline.supervise.parent import NODE_VARIABLE
from paceline.supervise.supervisor import is_supervised


def act(fault: FaultSpec, number: int, run_dir: Path) -> None:
    """Do to this process, or to those above it, what a fault does; returns where the process survives it."""
    told = f"fault {number} ({fault.kind}) was made on purpose"
    if fault.kind in ("kill", "stop", "signal"):
        _send(fault, told, run_dir)
    elif fault.kind == "delay":
        _late(fault.seconds)
    elif fault.kind == "descriptors":
        _without_descriptors(fault.seconds)
    elif fault.kind in ("cut", "slow_network"):
        disturb(fault, told)
    elif fault.kind == "error":
        raise RuntimeError(told)
    else:
        assert fault.kind == "oom", fault.kind
        import torch

        raise torch.OutOfMemoryError(f"out of memory: {told}")


def keep_busy(seconds: float) -> None:
    """Compute for so long, as a rank does whose device is slow."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _coordinator(run_dir: Path, told: str) -> int:
    """Return the process that coordinates the run. Raises ConfigError where it is not on this node."""
    meeting = find_meeting(run_dir)
    if meeting is None or str(meeting.node) != os.environ.get(NODE_VARIABLE):
        where = f"it runs on node {meeting.node}" if meeting else "only a run on several nodes has one"
        raise ConfigError(f"{told} for the coordinator, and cannot be", where, "a rank of the coordinator's node")
    return meeting.process


def _send(fault: FaultSpec, told: str, run_dir: Path) -> None:
    target = os.getpid()
    if fault.whom == "coordinator":
        target = _coordinator(run_dir, told)
    if fault.whom == "supervisor":
        if not is_supervised():
            raise ConfigError(
                f"{told} for the supervisor, and this process has none",
                "a run on one device trains in the process that was started",
                'whom = "rank", or a plan of several devices',
            )
        target = os.getppid()
    names = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if fault.kind == "stop" and fault.seconds:
        # Who stands still cannot wake up by itself. The waker is in this rank's process group, and ends with it.
        subprocess.Popen(["sh", "-c", f"sleep {fault.seconds}; kill -CONT {target}"], close_fds=True)
    os.kill(target, names.get(fault.kind) or signal.Signals[fault.signal])


def _late(seconds: float) -> None:
    time.sleep(seconds)  # the fault itself, and no synchronisation


def _without_descriptors(seconds: float) -> None:
    """Let this process open no further file for some seconds."""
    probe = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
    os.close(probe)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    timer = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_NOFILE, (soft, hard)))
    timer.daemon = True
    timer.start()


def without_room(run_dir: Path) -> Callable[[], None]:
    """Let no file of this process grow beyond the size that the journal has now; return what ends that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    starts = starts_of(run_dir)
    resource.setrlimit(resource.RLIMIT_FSIZE, (starts[-1][1].stat().st_size if starts else 0, before[1]))
    return functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, before)
