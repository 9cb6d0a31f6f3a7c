"""Idle shutdown: a run of one process whose loop stands still between steps is saved and ended.

The loop of a `Run` is the user's. At a prompt or in a notebook it may stand still for days, with a device that nobody
uses. A thread looks at the time since the run was last busy. The run is busy in a step, while it reads a batch,
evaluates or saves; a lock is held meanwhile, so the thread saves between two steps and never within one.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.errors import HandedBack, Requeue
from paceline.supervise.signals import StopFlag
from paceline.units import format_durations

LOOKS = 20  # at the clock in one limit
LONGEST_LOOK_SECONDS = 5.0


class IdleWatch:
    """Counts the time since a run was last busy, and ends the run when the limit is over.

    `end` is called once, with the reason, in the thread that looks. It is not kept alive: the run owns this watch.
    """

    def __init__(
        self, limit_seconds: float, end: Callable[[str], None], is_prompt: bool, stop: StopFlag,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """At a prompt (`is_prompt`) the process goes on; elsewhere `stop` raises Requeue in its main thread."""
        self.limit_seconds = limit_seconds
        self._end, self._is_prompt, self._stop, self._clock = weakref.WeakMethod(end), is_prompt, stop, clock
        self._busy = threading.RLock()
        self._since = clock()
        self.left()
        self._because = ""  # why the run has ended
        self._closed = threading.Event()

    def begin(self) -> IdleWatch:
        """Begin to look, in a thread that ends with the run."""
        threading.Thread(target=_look_often, args=(weakref.ref(self), self._closed), name="paceline-idle",
                         daemon=True).start()  # fmt: skip
        return self

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Hold the run's end off for a block, after which the time counts anew. Raises as `refuse` does."""
        with self._busy:
            self.refuse()
            try:
                yield
            finally:
                self._since = self._clock()

    def refuse(self) -> None:
        """Raise Requeue where this watch has ended the run; at a prompt HandedBack."""
        if self._because:
            raise HandedBack(self._because) if self._is_prompt else Requeue(self._because)

    def look(self) -> bool:
        """End the run where it was not busy for as long as the limit; return whether nothing is left to look for."""
        end = self._end()
        if end is None or self._closed.is_set():
            return True
        if not self._busy.acquire(blocking=False):
            return False
        try:
            idle_seconds = self._clock() - self._since
            if idle_seconds < self.limit_seconds:
                return False
            idle, limit = format_durations(idle_seconds, self.limit_seconds)
            self._because = f"no step for {idle}, and run.idle_limit is {limit}"
            end(self._because)
            if not self._is_prompt:
                self._stop.raise_in_main(Requeue(self._because))
        finally:
            self._busy.release()
        return True

    def left(self) -> None:
        """Note that the loop was left: a script goes on with something else, until the run is busy again."""
        if not self._is_prompt:
            self._since = math.inf

    def close(self) -> None:
        """Look no further: the run has ended by itself."""
        self._closed.set()


def _look_often(watch: weakref.ref[IdleWatch], closed: threading.Event) -> None:
    """Look until the run has ended, or until nobody uses it any more."""
    while (there := watch()) is not None and not there.look():
        every = min(LONGEST_LOOK_SECONDS, there.limit_seconds / LOOKS)
        del there
        if closed.wait(every):
            return
