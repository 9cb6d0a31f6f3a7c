"""Outbox: messages on the way to sinks, a thread for every sink. Nobody waits for a sink."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from paceline.errors import PacelineError
from paceline.observe.alerts.message import AlertMessage
from paceline.observe.alerts.sinks.make import NamedSink
from paceline.patience import Patience
from paceline.units import plural

MOST_WAITING = 100  # messages for one sink; beyond it the oldest is dropped
RETRY_SECONDS = (1.0, 5.0, 30.0)  # before each further try


class Outbox:
    """The sinks of one watch."""

    def __init__(self, sinks: Sequence[NamedSink], say: Callable[[str], None] = lambda line: None) -> None:
        """`say` is told once of a sink that takes nothing."""
        self._queues = [_SinkQueue(sink, say) for sink in sinks]

    def put(self, message: AlertMessage) -> None:
        """Hand a message to every sink that wants some of it. It waits for nothing."""
        for each in self._queues:
            each.put(message)

    def close(self, patience_seconds: float) -> None:
        """Wait so long in all for what is on its way; what is left then is dropped, and said."""
        patience = Patience(patience_seconds)
        for each in self._queues:
            each.finish(patience)

    def failures(self) -> Mapping[str, str]:
        """Return why each sink that took nothing at its last try did not."""
        return {each.name: each.failure for each in self._queues if each.failure}


class _SinkQueue:
    """What waits for one sink, and the thread that sends it."""

    def __init__(self, sink: NamedSink, say: Callable[[str], None]) -> None:
        self.name, self.failure = sink.name, ""
        self._sink, self._say = sink, say
        self._messages: deque[AlertMessage] = deque(maxlen=MOST_WAITING)
        self._changed = threading.Condition()
        self._is_busy = self._is_closing = False
        self._thread = threading.Thread(target=self._work, name=f"paceline-{sink.name}", daemon=True)
        self._thread.start()

    def put(self, message: AlertMessage) -> None:
        wanted = self._sink.wanted(message)
        if wanted is not None:
            with self._changed:
                self._messages.append(wanted)
                self._changed.notify_all()

    def finish(self, patience: Patience) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            while (self._messages or self._is_busy) and not patience.is_over:
                self._changed.wait(0.05)
            if self._messages or self._is_busy:
                left = plural(len(self._messages) + self._is_busy, "message")
                self._say(f"alert    not sent to {self.name}: {left}")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                while not self._messages:
                    if self._is_closing:
                        return
                    self._changed.wait()
                message, self._is_busy = self._messages.popleft(), True
            self._send(message)

    def _send(self, message: AlertMessage) -> None:
        for seconds in (*RETRY_SECONDS, None):
            try:
                self._sink.send(message)
            except PacelineError as error:
                if not self.failure:
                    self._say(f"alert    {self.name} takes no message: {error.because}")
                self.failure = error.because
                if seconds is None or self._closing_after(seconds):
                    return
            else:
                self.failure = ""
                return

    def _closing_after(self, seconds: float) -> bool:
        """Return whether the outbox is being closed, after so many seconds or as soon as it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closing, seconds)
