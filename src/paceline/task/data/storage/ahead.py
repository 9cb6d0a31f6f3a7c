"""Fetching ahead: a few threads fetch what will be wanted, while what was fetched before is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from paceline.task.data.storage.blocks import Bytes

THREADS = 8  # requests at the same time
MOST_AHEAD = 64  # pieces that are begun and not there yet


class FetchesAhead:
    """Calls that give pieces by their keys, begun before the pieces are wanted; the same key once at a time.

    Threads are made with the first call and are daemons: a process that ends does not wait for what it no longer wants.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[str, Future[Bytes]] = {}
        self._calls: queue.SimpleQueue[tuple[str, Future[Bytes], Callable[[], Bytes]]] = queue.SimpleQueue()
        self._begun = False

    def begin(self, key: str, call: Callable[[], Bytes]) -> bool:
        """Begin a call, unless too many are under way: then return False."""
        with self._lock:
            if key in self._coming:
                return True
            if len(self._coming) >= MOST_AHEAD:
                return False
            if not self._begun:
                self._begun = True
                for number in range(THREADS):
                    threading.Thread(target=self._work, name=f"paceline-fetch-{number}", daemon=True).start()
            future: Future[Bytes] = Future()
            self._coming[key] = future
        self._calls.put((key, future, call))
        return True

    def take(self, key: str, call: Callable[[], Bytes]) -> Bytes:
        """Return a piece: of the call that is under way, or by this one. Raises what the call raises."""
        with self._lock:
            coming = self._coming.get(key)
        return call() if coming is None else coming.result()

    def _work(self) -> None:
        while True:
            key, future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # raised where the piece is taken
                future.set_exception(error)
            with self._lock:
                del self._coming[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return FetchesAhead, ()  # another process fetches by itself
