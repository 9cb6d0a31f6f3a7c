"""Ranks forked from one process that has imported everything: a rank starts in milliseconds and shares the imports.

The process that forks must have started no thread: a fork copies only the thread that calls it, and a lock that another
one held stays locked in the child for ever. Torch starts threads with its first backward pass and its first group.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping

from paceline.said import flush_said
from paceline.supervise.parent import end_with_parent
from paceline.supervise.signals import STOP_SIGNALS


class Forked:
    """A forked process, with what a supervisor asks of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how the process ended (minus the signal that ended it), or None while it runs."""
        if self.returncode is None:
            self._collect(os.WNOHANG)
        return self.returncode

    def wait(self) -> int:
        """Return how the process ended, when it has."""
        if self.returncode is None:
            self._collect(0)
        assert self.returncode is not None
        return self.returncode

    def _collect(self, options: int) -> None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


def fork(work: Callable[[], int], environ: Mapping[str, str]) -> Forked:
    """Start a process that calls `work()` with additions to the environment, and ends with the code it returns."""
    child = split(environ, signal.SIGKILL)
    if child is not None:
        return child
    code = 1
    try:
        code = work()
    finally:
        leave(code)
    raise AssertionError("a forked process has left")


def split(environ: Mapping[str, str], number: int) -> Forked | None:
    """Fork, and return the new process here and None in it, which has these additions to its environment.

    It has a process group of its own, the default reaction to stop signals, and gets the signal `number` when this
    process dies.
    """
    parent = os.getpid()
    # A signal between the fork and the child's own handlers would run this process's handlers there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    flush_said()  # or both processes would write what waits there
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):  # both sides make the group: neither may use it before it is there
            os.setpgid(child, child)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Forked(child)
    try:
        os.setpgid(0, 0)
        for stop in STOP_SIGNALS:
            signal.signal(stop, signal.default_int_handler if stop == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end_with_parent(parent, number)
        os.environ.update(environ)
    except BaseException:
        leave(1)
    return None


def leave(code: int) -> None:
    """End this process without waiting for anything, such as collectives that will never come."""
    flush_said()
    os._exit(code)
