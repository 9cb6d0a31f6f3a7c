"""Fetching ahead: a few threads fetch what will be wanted, while what was fetched before is used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.task.data.daemons import DaemonThreads

if TYPE_CHECKING:
    from concurrent.futures import Future

THREADS = 8  # requests at the same time
MOST_AHEAD = 1024  # pieces that are begun and not there yet


class FetchesAhead:
    """Calls that fetch pieces, begun before the pieces are wanted; the same piece once at a time.

    Threads are made with the first call, and a process that ends does not wait for what it no longer wants. In a forked
    process nothing is being fetched until it begins something itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[str, Future[None]] = {}
        self._threads = DaemonThreads(THREADS, "paceline-fetch")

    def is_coming(self, key: str) -> bool:
        """Return whether a piece is being fetched."""
        return key in self._coming and not self._threads.is_inherited

    def begin(self, keys: Sequence[str], call: Callable[[], object]) -> bool:
        """Begin a call that fetches these pieces, unless too many are under way: then return False."""
        if self._threads.is_inherited:
            self._lock, self._coming = threading.Lock(), {}
        with self._lock:
            if len(self._coming) >= MOST_AHEAD:
                return False
            own = [key for key in keys if key not in self._coming]
            self._coming.update(dict.fromkeys(own, self._threads.submit(self._fetch, own, call)))
        return True

    def wait(self, keys: Sequence[str]) -> None:
        """Return when none of these pieces is being fetched. Raises what their calls raise."""
        if self._threads.is_inherited:
            return
        with self._lock:
            coming = {id(future): future for key in keys if (future := self._coming.get(key)) is not None}
        for future in coming.values():
            future.result()

    def _fetch(self, keys: Sequence[str], call: Callable[[], object]) -> None:
        try:
            call()
        finally:
            with self._lock:
                for key in keys:
                    del self._coming[key]

    def __reduce__(self) -> tuple[object, ...]:
        return FetchesAhead, ()  # another process fetches by itself
