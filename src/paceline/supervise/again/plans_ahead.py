"""Plans made ahead: for the world that the loss of one machine would leave, while the supervisor has nothing to do.

A plan takes a tenth of a second and its proof seconds, which a recovery then waits for. They are made in a thread of
the lowest priority, whose processes inherit it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

from paceline.errors import PacelineError

LOWEST = 19  # nice


class Ahead:
    """Makes plans for numbers of devices, each once, and lets who wants one of them wait for that."""

    def __init__(self, make: Callable[[int], object]) -> None:
        """`make(devices)` makes a plan, keeps it where it is found again, and raises a PacelineError where none is."""
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
        """Return whether a plan for so many devices was made ahead; one that is being made is waited for."""
        if devices in self._begun:
            self._begun[devices].wait()
        return devices in self._made

    def _work(self, devices: Sequence[int], done: threading.Event) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        try:
            for number in devices:
                try:
                    self._make(number)
                    self._made.add(number)
                    return
                except PacelineError:  # who asks for it is told
                    continue
        finally:
            done.set()
