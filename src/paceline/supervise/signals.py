"""Stop signals: a handler only sets a flag; the ranks agree on it at the next step boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from paceline.errors import Requeue
from paceline.supervise.logs.rank import let_go

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def hangup() -> tuple[signal.Signals, ...]:
    """Return SIGHUP, which says that the terminal has gone, where it would end this process.

    None under `nohup`, and where a handler of the user's own reacts to it.
    """
    handler = signal.getsignal(signal.SIGHUP)
    is_ours = str(getattr(handler, "__module__", "")).startswith("paceline.")
    return (signal.SIGHUP,) if handler is signal.SIG_DFL or is_ours else ()


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Put stop signals to this thread off for the block; a process that is started in it has them put off until it
    says otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopFlag:
    """Remembers that this process was asked to stop. A second SIGINT interrupts at once, as in any program.

    Within `saving()` it waits until the block is over: a save is whole or not there, and the one that the first SIGINT
    asked for is wanted. A third one interrupts that too.
    """

    def __init__(self) -> None:
        self.because = ""
        self._previous: dict[int, Any] = {}
        self._is_saving = self._interrupt_waits = False
        self._raises: BaseException | None = None  # at the next signal

    def watch(self) -> StopFlag:
        """Install the handlers. Outside of the main thread nothing is installed: Python allows it only there."""
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, *hangup()):
                self._previous[number] = signal.signal(number, self._received)
        return self

    def release(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Put a second SIGINT off until the block is over."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def interrupt_if_asked(self) -> None:
        """Raise KeyboardInterrupt where a second SIGINT came during a save."""
        if self._interrupt_waits:
            self._interrupt_waits = False
            raise KeyboardInterrupt

    def raise_in_main(self, error: BaseException) -> None:
        """Have the main thread raise an error wherever it stands, while the handlers are installed.

        To be called in another thread. A signal reaches a main thread that sleeps or waits for a key too.
        """
        if signal.SIGTERM in self._previous:
            self._raises = error
            os.kill(os.getpid(), signal.SIGTERM)

    def _received(self, number: int, frame: object) -> None:
        if self._raises is not None:
            raise self._raises
        if number == signal.SIGINT and self.because:
            if not self._is_saving or self._interrupt_waits:
                raise KeyboardInterrupt
            self._interrupt_waits = True
            return
        let_go()  # who asks may be a supervisor's death
        self.because = f"received {signal.Signals(number).name}"


class ForwardingFlag(StopFlag):
    """A StopFlag that also passes every stop signal on through `send`."""

    def __init__(self, send: Callable[[int], None]) -> None:
        super().__init__()
        self._send, self._number = send, 0

    def hand_on(self) -> None:
        """Have this process react to the last signal as it would have without this flag, which is released by now.

        Raises Requeue where it would not react: what the signal has ended is not gone on with.
        """
        if self._number:
            signal.raise_signal(self._number)
            raise Requeue(self.because)

    def _received(self, number: int, frame: object) -> None:
        self.because, self._number = f"received {signal.Signals(number).name}", number
        self._send(number)


def forward_signals(send: Callable[[int], None]) -> ForwardingFlag:
    """Return a watching StopFlag that also passes every stop signal on through `send`."""
    flag = ForwardingFlag(send)
    flag.watch()
    return flag
