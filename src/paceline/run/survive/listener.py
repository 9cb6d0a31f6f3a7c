"""The supervisor's word that a peer has gone, listened for where collectives do not see that by themselves.

Gloo's do where the peer's machine says that a connection has ended; a machine that is lost, or cut off, says nothing.
NCCL's wait for the time-out. So under gloo the word is acted on only where collectives have not ended by themselves:
connections that this process shuts while a send begins may leave gloo waiting for that send (torch 2.13; 4 of 165 times
in a loop of collectives, and in none of 250 where the peer's end alone was seen). On one machine they nearly always do;
of 300 faults two left ranks in a save that waited for each other, until they were ended by force.

A collective of NCCL's that is ended so has no error, and gives whatever it had come to. Whoever decides by that asks
`refuse_ended_groups` first; and whether the device had made the last update is asked before groups are ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.patience import Patience
from paceline.run.process.groups import abort_groups
from paceline.run.survive.last_update import LastUpdate
from paceline.supervise.control import ABORT_NAME, CONTROL_VARIABLE
from paceline.supervise.parent import NODE_VARIABLE
from paceline.supervise.pulses.pulse import processes_in
from paceline.supervise.pulses.system import parent_of, state_of
from paceline.supervise.supervisor import ERROR_FOLDER

LOOK_SECONDS = 0.2  # between two looks for the word
BY_ITSELF_SECONDS = 1.0  # that gloo has to see the end of a connection
ON_ONE_MACHINE_SECONDS = 3.0  # the same, where the system tells of each end at once


class Listener:
    """Listens in one world: aborts its groups when the word comes, and never those of the world after it."""

    def __init__(self, word: Path, after_seconds: float) -> None:
        """The word is acted on so long after it came, if this process has not left its world by then."""
        self._after_seconds, self.has_acted = after_seconds, False
        self.last_update: LastUpdate | None = None  # of this process's model
        self._had_update = True  # whether the device had made it before the groups were ended
        self._launches = 0  # of updates by then: what was launched later may have collectives that were ended
        self._word, self._ended, self._acting = word, threading.Event(), threading.Lock()
        self._parent = os.getppid()
        threading.Thread(target=self._listen, name="paceline-abort", daemon=True).start()

    @property
    def is_told(self) -> bool:
        """Whether the word has come."""
        return self.has_acted or self._word.exists()

    def had(self, updates: LastUpdate) -> bool:
        """Return whether the device had made the last update before this listener ended the groups.

        The host goes on meanwhile: an update that it has launched since then is one that nobody knows to be whole.
        """
        return self._had_update and (updates is not self.last_update or updates.launches == self._launches)

    def stop(self) -> None:
        """Listen no more: what this process does from here on is of another world."""
        with self._acting:
            self._ended.set()

    def _listen(self) -> None:
        while not self._ended.wait(LOOK_SECONDS) and self._word.parent.is_dir():
            if os.getppid() != self._parent:
                wake_stopped(self._word.parent)
            if self._word.exists():
                patience = Patience(self._after_seconds)
                while not patience.is_over and not self._ended.wait(LOOK_SECONDS):
                    pass
                with self._acting:
                    if not self._ended.is_set():
                        self._look_at_update()
                        self.has_acted = True
                        abort_groups()
                return

    def _look_at_update(self) -> None:
        if self.last_update is not None:
            self._launches = self.last_update.launches  # first: one that is launched meanwhile does not count
            self._had_update = self.last_update.is_made()


def wake_stopped(folder: Path) -> None:
    """Have peers of this machine go on that a signal has stopped, where nobody supervises them any more.

    They were asked to save and to end, which a process that is stopped does not hear, and the others wait for them.
    """
    for process in processes_in(folder):
        # An orphan as this one is: numbers of processes that have ended are given again.
        if state_of(process) == "T" and parent_of(process) == os.getppid():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.kill(process, signal.SIGCONT)


_LISTENERS: list[Listener] = []  # at most one: a process is in one world


def listen_for_abort(device: torch.device) -> None:
    """Have collectives of this world end when the supervisor says that a peer has gone."""
    stop_listening()
    folder = os.environ.get(ERROR_FOLDER)
    if folder and CONTROL_VARIABLE in os.environ:
        by_itself = BY_ITSELF_SECONDS if NODE_VARIABLE in os.environ else ON_ONE_MACHINE_SECONDS
        after_seconds = 0.0 if device.type == "cuda" else by_itself
        _LISTENERS.append(Listener(Path(folder) / ABORT_NAME, after_seconds))


def watch_updates(updates: LastUpdate) -> None:
    """Have the updates of a model looked at before the groups of this process's world are ended."""
    for each in _LISTENERS:
        each.last_update = updates


def holds_update(updates: LastUpdate) -> bool:
    """Return whether the last update was made whole. It is asked before this process ends its groups by itself."""
    ended = [each for each in _LISTENERS if each.has_acted]
    return all(each.had(updates) for each in ended) if ended else updates.is_made()


def refuse_ended_groups() -> None:
    """Raise an error of torch.distributed's where the groups of this process's world have been ended.

    What a collective has given by now is then of nobody.
    """
    if was_aborted():
        raise dist.DistBackendError("the groups of this world were ended at the supervisor's word: a peer has gone")


def was_aborted() -> bool:
    """Return whether the groups of this process's world have been ended at the supervisor's word.

    Whatever fails from then on until the world is left, fails for that: torch has errors of several kinds for it.
    """
    return any(each.has_acted for each in _LISTENERS)


def has_lost_a_peer() -> bool:
    """Return whether the supervisor has said that a peer of this process's world has gone, acted on or not.

    What needs all ranks comes to nothing from then on. Who waits for a thread that is in a collective asks this: the
    thread may wait for a peer whose own thread has given up, and which has shut nothing yet.
    """
    return any(each.is_told for each in _LISTENERS)


def refuse_lost_world(step: int) -> None:
    """Raise an error of torch.distributed's where a peer has gone, for a save of a step that has not ended by itself.

    The rank that raises it leaves its world, which all others see: none waits longer than the first of them.
    """
    if has_lost_a_peer():
        raise dist.DistError(f"the world has ended, and the save of step {step} with it: a peer has gone")


def stop_listening() -> None:
    """Listen no more for the word of the world that this process has been in."""
    while _LISTENERS:
        _LISTENERS.pop().stop()
