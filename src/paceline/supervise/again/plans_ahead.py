"""Plans made ahead: for the world that the loss of one machine would leave, while the supervisor has nothing to do.

A plan takes some tenths of a second and its proof seconds, which a recovery then waits for. They are made in a thread,
which takes the lowest priority before the proof, for the proof's processes to inherit it. It does not before: a thread
that computes and gets no core holds the interpreter meanwhile, and so whoever recovers.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

from paceline.errors import PacelineError

LOWEST = 19  # nice
WAIT_SECONDS = 3.0  # for a plan that is being made: where cores are busy the lowest priority may get none


class Ahead:
    """Makes plans for numbers of devices, each once, and lets who wants one of them wait for that."""

    def __init__(self, make: Callable[[int, Callable[[], None]], object]) -> None:
        """`make(devices, before_proof)` makes a plan, keeps it where it is found again, and calls `before_proof`.

        It raises a PacelineError where there is no plan.
        """
        self._make = make
        self._begun: dict[int, threading.Event] = {}
        self._made: set[int] = set()

    def begin(self, devices: Sequence[int]) -> None:
        """Make a plan for the first of these numbers that has one."""
        if devices and devices[0] not in self._begun:
            done = threading.Event()
            self._begun |= dict.fromkeys(devices, done)
            threading.Thread(target=self._work, args=(devices, done), name="paceline-ahead", daemon=True).start()

    def wait_for(self, devices: int) -> bool:
        """Return whether a plan for so many devices was made ahead; one that is being made is waited for, not long."""
        if devices in self._begun:
            self._begun[devices].wait(WAIT_SECONDS)
        return devices in self._made

    def _work(self, devices: Sequence[int], done: threading.Event) -> None:
        try:
            for number in devices:
                try:
                    self._make(number, _give_way)
                    self._made.add(number)
                    return
                except PacelineError:  # who asks for it is told
                    continue
        finally:
            done.set()


def _give_way() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
