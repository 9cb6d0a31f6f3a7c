"""Fetching ahead: a few threads fetch what will be wanted, while what was fetched before is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

THREADS = 8  # requests at the same time
MOST_AHEAD = 1024  # pieces that are begun and not there yet


class FetchesAhead:
    """Calls that fetch pieces, begun before the pieces are wanted; the same piece once at a time.

    Threads are made with the first call and are daemons: a process that ends does not wait for what it no longer wants.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[str, Future[None]] = {}
        self._calls: queue.SimpleQueue[tuple[Sequence[str], Future[None], Callable[[], object]]] = queue.SimpleQueue()
        self._begun = False

    def is_coming(self, key: str) -> bool:
        """Return whether a piece is being fetched."""
        return key in self._coming

    def begin(self, keys: Sequence[str], call: Callable[[], object]) -> bool:
        """Begin a call that fetches these pieces, unless too many are under way: then return False."""
        future: Future[None] = Future()
        with self._lock:
            if len(self._coming) >= MOST_AHEAD:
                return False
            if not self._begun:
                self._begun = True
                for number in range(THREADS):
                    threading.Thread(target=self._work, name=f"paceline-fetch-{number}", daemon=True).start()
            own = [key for key in keys if key not in self._coming]
            self._coming.update(dict.fromkeys(own, future))
        self._calls.put((own, future, call))
        return True

    def wait(self, keys: Sequence[str]) -> None:
        """Return when none of these pieces is being fetched. Raises what their calls raise."""
        with self._lock:
            coming = {id(future): future for key in keys if (future := self._coming.get(key)) is not None}
        for future in coming.values():
            future.result()

    def _work(self) -> None:
        while True:
            keys, future, call = self._calls.get()
            try:
                call()
                future.set_result(None)
            except BaseException as error:  # raised where the pieces are taken
                future.set_exception(error)
            with self._lock:
                for key in keys:
                    del self._coming[key]

    def __reduce__(self) -> tuple[object, ...]:
        return FetchesAhead, ()  # another process fetches by itself
