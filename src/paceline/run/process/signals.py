"""Stop signals: a handler only sets a flag; the ranks agree on it at the next step boundary."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopFlag:
    """Remembers that this process was asked to stop. A second SIGINT interrupts at once, as in any program."""

    def __init__(self) -> None:
        self.because = ""
        self._previous: dict[int, Any] = {}

    def watch(self) -> StopFlag:
        """Install the handlers. Outside of the main thread nothing is installed: Python allows it only there."""
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._received)
        return self

    def release(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _received(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.because:
            raise KeyboardInterrupt
        self.because = f"received {signal.Signals(number).name}"


def forward_signals(send: Callable[[int], None]) -> StopFlag:
    """Return a watching StopFlag that also passes every stop signal on through `send`."""

    class Forwarding(StopFlag):
        def _received(self, number: int, frame: object) -> None:
            self.because = f"received {signal.Signals(number).name}"
            send(number)

    return Forwarding().watch()
