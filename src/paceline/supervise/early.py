"""Signals to a command before and after its run: the command ends in order, with no process left behind.

While ranks train, they are told and agree on a step (signals.py). Before that there is nothing to save.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from paceline.errors import Requeue

Raised = Callable[[int], BaseException]


class Terminated(SystemExit):
    """A command was asked to end by a signal: 128 and its number, as where the signal itself ends it."""


@contextlib.contextmanager
def ended_in_order(numbers: tuple[int, ...], raised: Raised) -> Iterator[Callable[[], None]]:
    """Raise what `raised(signal)` returns where one of the signals comes, so that every `with` block is left.

    Signals that somebody else handles or ignores are left alone, and so are all outside of the main thread. Yields
    what is called when the work is done: from then on the signals are waited out, for what is left is short.
    """
    is_done = False

    def received(number: int, frame: object) -> None:
        if not is_done:
            raise raised(number)

    def done() -> None:
        nonlocal is_done
        is_done = True

    here = threading.current_thread() is threading.main_thread()
    taken = [number for number in numbers if here and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, received)
    try:
        yield done
    finally:
        for number in taken:
            if signal.getsignal(number) == received:  # else somebody has taken the signal over meanwhile
                signal.signal(number, signal.SIG_DFL)


def requeued_early() -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Have SIGTERM, SIGUSR1 and SIGHUP end with Requeue what prepares a run. Ctrl-C interrupts it, as any program."""
    return ended_in_order((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), _requeue)


def terminated() -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Have SIGTERM end a command that trains nothing in order, with the exit code that it would have anyway."""
    return ended_in_order((signal.SIGTERM,), lambda number: Terminated(128 + number))


def _requeue(number: int) -> Requeue:
    return Requeue(f"received {signal.Signals(number).name} before the run began; nothing was trained")
