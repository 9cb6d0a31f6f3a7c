"""Plans made ahead: for the world that the loss of one machine would leave, or that devices which came would make.

A plan takes some tenths of a second and its proof seconds, for which a recovery would wait, and in which nobody would
look after the ranks of a world that is to grow. So they are made in a thread of the supervisor's own priority. The
processes of the proof alone may have the lowest: a thread that has it holds the interpreter while it gets no core, and
so holds up whoever recovers for as long as anything else wants that core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.errors import PacelineError

WAIT_SECONDS = 3.0  # for a plan that is being made: where cores are busy the processes of its proof may get none


class Ahead:
    """Makes plans for numbers of devices, each once, and lets who wants one of them wait for that."""

    def __init__(self, make: Callable[[int], object]) -> None:
        """`make(devices)` makes a plan, keeps it where it is found again, and raises a PacelineError where none is."""
        self._make = make
        self._begun: set[int] = set()
        self._at_work: dict[int, threading.Event] = {}  # by the number that a plan is made for now
        self._made: set[int] = set()

    def is_at_work(self, devices: int) -> bool:
        """Return whether a plan for this very number is being made."""
        return devices in self._at_work

    def is_made(self, devices: int) -> bool | None:
        """Return whether there is a plan for so many devices; None while that is not known. Nobody is waited for."""
        return None if devices not in self._begun or self.is_at_work(devices) else devices in self._made

    def begin(self, devices: Sequence[int]) -> None:
        """Make a plan for the first of these numbers that has one."""
        if devices and devices[0] not in self._begun:
            self._begun |= set(devices)
            self._at_work[devices[0]] = threading.Event()
            threading.Thread(target=self._work, args=(devices,), name="paceline-ahead", daemon=True).start()

    def wait_for(self, devices: int) -> bool:
        """Return whether a plan for so many devices was made ahead. The very one is waited for, no other, and not long.

        A plan for more devices than are left is of no use to who asks.
        """
        at_work = self._at_work.get(devices)
        if at_work is not None:
            at_work.wait(WAIT_SECONDS)
        return devices in self._made

    def _work(self, devices: Sequence[int]) -> None:
        for number, following in zip(devices, [*devices[1:], None], strict=True):
            try:
                self._make(number)
                self._made.add(number)
                return
            except PacelineError:  # who asks for it is told
                if following is not None:  # who is let go below may ask for it
                    self._at_work.setdefault(following, threading.Event())
            finally:
                self._at_work.pop(number, threading.Event()).set()
