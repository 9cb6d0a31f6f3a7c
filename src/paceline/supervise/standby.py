"""Standby: a process that has imported torch, asked to fork ranks. Each starts in milliseconds, also to replace one.

The process runs a module that the caller names (session/standby.py says what it does). Here is the side of the
supervisor, which imports no torch. Both talk over a pair of sockets, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.cluster.here.heap import joined_heap
from paceline.cluster.here.waiting import waiting
from paceline.lock import RunLock
from paceline.patience import Patience
from paceline.supervise.groups import HASHES_ALIKE, Process, collect, has_ended
from paceline.supervise.lines import Lines, is_ready
from paceline.supervise.signals import blocked_signals
from paceline.system.end_of_parent import PARENT_VARIABLE


class Lent:
    """A rank that the standby has forked: its child, and not this process's."""

    is_child = False

    def __init__(self, standby: Standby, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # set once it is collected: until then its number is nobody else's
        self._standby = standby

    def poll(self) -> int | None:
        """Return how the process ended, or None while it runs."""
        return self._standby.ending_of(self.pid) if self.returncode is None else self.returncode

    def wait(self) -> int:
        """Return how the process ended, when it has."""
        if self.returncode is None:
            self.returncode = self._standby.collect(self.pid)
        return self.returncode


class StartsApart(Protocol):
    """Starts processes that are no ranks of the run, as a standby does."""

    def is_ready(self) -> bool:
        """Return whether a process can be started so by now."""

    def start_apart(self, work: Sequence[str], environ: Mapping[str, str]) -> Process:
        """Start one that does this work. Raises OSError where it cannot after all."""


WORKER, SCRIPT, PROOF = "worker", "script", "proof"  # kinds of work, which its first word is
FORK_SECONDS = 30.0  # that a fork may take
TELL_SECONDS = 5.0  # that a standby has to tell of a rank that has ended
LOOK_SECONDS = 0.5
# NumPy's matrix library starts a thread for each core when it is loaded, which a fork would lose; torch has its own.
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}


class Standby:
    """The supervisor's hold on a process that forks ranks. `because` says why there is none, where there is none."""

    def __init__(self, module: str, kind: str, environ: Mapping[str, str], lock: RunLock | None = None) -> None:
        """Start the module as a process. It takes `kind` of the ranks, and says by that what they need."""
        ours, theirs = socket.socketpair()
        self._lines, self._endings, self._lock = Lines(ours), dict[int, int](), lock
        self._work, self._environ = list[str](), dict[str, str]()
        self._untold = dict[int, Patience]()  # of ranks that have ended: how long that may go without a word of it
        self._is_ready, self._is_closed = False, False
        self.has_forked = False  # whether it has served already: one that ends then was ended by somebody
        self.because = ""
        with theirs, blocked_signals():
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), kind],
                env={
                    **NO_THREADS, **HASHES_ALIKE, **waiting(environ), **environ, **joined_heap(environ),
                    PARENT_VARIABLE: str(os.getpid()),
                },
                process_group=0, pass_fds=(theirs.fileno(), *((lock.descriptor,) if lock else ())),
            )  # fmt: skip

    def hold(self, lock: RunLock) -> None:
        """Have the standby hold the lock of a run's directory too, and so its ranks: it began before that was taken."""
        self._lock = lock
        with contextlib.suppress(OSError):  # it has ended, which is told by who asks whether it is ready
            self._lines.send_descriptor({"lock": True}, lock.descriptor)

    def forks(self, work: Sequence[str], environ: Mapping[str, str]) -> None:
        """Take what ranks do, in words that the module takes, and where: it may import before that is known."""
        self._work, self._environ = list(work), dict(environ)

    def is_ready(self) -> bool:
        """Return whether it can fork, when that is known; `because` says why not."""
        if not self._is_ready and not self.because:
            try:
                told = self._lines.take()
                assert told is not None
                self.because, self._is_ready = told["because"], not told["because"]
            except EOFError:
                self._is_gone()
        return self._is_ready

    def start(self, place: Mapping[str, str]) -> Lent:
        """Fork a rank with these additions to its environment. Raises OSError where the standby is gone."""
        held = self._lock.for_first_rank() if self._lock else {}
        return self.start_apart(self._work, {**self._environ, **place, **held})

    def start_apart(self, work: Sequence[str], environ: Mapping[str, str]) -> Lent:
        """Fork a process that is no rank of the run. Raises OSError where the standby is gone."""
        try:
            self._lines.send({"fork": {**environ, PARENT_VARIABLE: str(self._process.pid)}, "work": list(work)})
            patience = Patience(FORK_SECONDS)
            while True:
                told = self._lines.take(LOOK_SECONDS)
                if told is None:
                    if patience.is_over:
                        self._end_silent()
                    continue
                if "forked" in told:
                    self.has_forked = True
                    self._forget(int(told["forked"]))  # a process before may have had the number
                    return Lent(self, int(told["forked"]))
                self._endings[told["ended"]] = told["code"]
        except EOFError as error:
            self._is_gone()
            raise ConnectionError("the standby process has ended") from error

    def ending_of(self, pid: int) -> int | None:
        """Return how a rank ended (minus the signal that ended it), or None while it runs."""
        try:
            if pid not in self._endings and self._is_closed:
                raise EOFError
            while pid not in self._endings and (told := self._lines.take(0.0)) is not None:
                self._endings[told["ended"]] = told["code"]
        except EOFError:
            self._is_gone()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # its parent can no longer say how it ended
            return self._endings.setdefault(pid, -signal.SIGKILL)
        is_untold = pid not in self._endings and has_ended(pid)
        if is_untold and self._untold.setdefault(pid, Patience(TELL_SECONDS)).is_over:
            self._end_silent()
        return self._endings.get(pid)

    def collect(self, pid: int) -> int:
        """Have the standby forget a rank that has ended, and return how it did."""
        while (code := self.ending_of(pid)) is None:
            is_ready(self._lines.end, select.POLLIN, 1.0)
        with contextlib.suppress(OSError):
            self._lines.send({"collect": pid})
        self._forget(pid)
        return code

    def _forget(self, pid: int) -> None:
        self._endings.pop(pid, None)
        self._untold.pop(pid, None)

    def close(self) -> None:
        """End the process, and whatever it has forked with it."""
        if not self._is_closed:  # its number may be another's by the second time
            self._is_closed = True
            self._lines.end.close()
            collect([self._process])

    def _end_silent(self) -> None:
        """End a standby that is alive and tells nothing, as one that was stopped: its ranks go with it."""
        self.because = self.because or "the process that forks ranks says nothing any more"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def _is_gone(self) -> None:
        self._is_ready = False
        self.because = self.because or "the process that forks ranks has ended"
