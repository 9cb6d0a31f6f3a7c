"""A process that ends when its parent dies, however the parent died: no process trains on as an orphan."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from paceline.system.end_of_parent import PARENT_VARIABLE, signal_at_end_of

NODE_VARIABLE = "PACELINE_NODE"  # the number of the node that a rank runs on, where a run has several
AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"  # set by torchrun's agent for what it starts
TASK_VARIABLE = "SLURM_TASK_PID"  # set by slurmstepd: the number of the process that it has started

_PARENT: list[int] = []  # whom this process ends with, where that was asked for: a fact about the process


def ends_by(environ: Mapping[str, str]) -> signal.Signals:
    """Return the signal that a rank gets when its supervisor dies.

    On one machine it is asked to save and to end. On one of several nodes it must go at once, as with its machine: what
    it was asked for it would agree on with the ranks of the other nodes, which go on without it.
    """
    return signal.SIGKILL if NODE_VARIABLE in environ else signal.SIGTERM


def end_with_parent(parent: int | None = None, number: int = 0) -> None:
    """Have the system send this process a signal when its parent dies, where the system offers that (Linux).

    `parent` is the process that started this one, by default the supervisor that the environment names; a parent that
    is already gone counts as dying now. The signal is what `ends_by` says, where no `number` is given. A fork forgets
    the wish: the child states its own.
    """
    if "RANK" in os.environ:
        name_process(f"rank-{os.environ['RANK']}-paceline")
    named = os.environ.pop(PARENT_VARIABLE, None)  # what this process starts has another parent
    expected = int(named) if parent is None and named else parent
    if expected is not None:
        _PARENT[:] = [expected]
        signal_at_end_of(expected, number or ends_by(os.environ))


def has_lost_parent() -> bool:
    """Return whether the process is gone that this one is to end with: nobody supervises this one any more."""
    return bool(_PARENT) and os.getppid() != _PARENT[0]


def end_with_launcher(environ: Mapping[str, str]) -> None:
    """Have this process asked to stop when torchrun's agent dies that started it: it saves, and ends with 75.

    Nobody would hear how the run ends, and an agent that somebody starts again would meet it in the run's directory.
    What else sets torch's variables may well be gone before the run is over. For srun `end_with_step` is enough.
    """
    if AGENT_VARIABLE in environ:
        signal_at_end_of(os.getppid(), signal.SIGTERM)
    end_with_step(environ)


def end_with_step(environ: Mapping[str, str]) -> None:
    """Have this process asked to stop when Slurm's slurmstepd dies that started it.

    Slurm ends what a slurmstepd has started through that slurmstepd alone: without it this process would train on when
    its job is over (Slurm 22.05). A process that such a task has started in turn is left alone.
    """
    if environ.get(TASK_VARIABLE) == str(os.getpid()):
        signal_at_end_of(os.getppid(), signal.SIGTERM)


def name_process(name: str) -> None:
    """Give this process a name of up to 15 characters, which `ps` and `top` show, where the system offers that.

    A name has no blank and no parenthesis: who cuts /proc/PID/stat at its blanks counts fields behind the name wrongly.
    Slurm's proctrack/linuxproc (22.05) never ended such a process; Python 3.12 to 3.14 do so where they look for other
    threads before a fork, and warned of threads that there were none of.
    """
    assert not set(name) & set(" ()\t\n"), name
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])
