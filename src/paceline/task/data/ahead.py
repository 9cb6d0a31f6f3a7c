"""Reading ahead: what comes next is read while the device computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Calls `read(*arguments)` before its result is wanted: in a thread of its own, or when this one has time.

    The thread is made where `prepare` is given, which is called first in it: CUDA's current device belongs to a thread.
    What a read raises is raised where its result is taken.
    """

    def __init__(self, read: Callable[..., Item], prepare: Callable[[], Any] | None = None) -> None:
        self._read = read
        self._thread: ThreadPoolExecutor | None = None
        if prepare is not None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-read", initializer=prepare)
        self._arguments: tuple[Any, ...] | None = None
        self._coming: Future[Item] | None = None

    def begin(self, *arguments: Any) -> None:
        """Say what `take` will be asked for next; a thread begins to read it."""
        self.forget()
        self._arguments = arguments
        if self._thread is not None:
            self._coming = self._thread.submit(self._read, *arguments)

    def read_begun(self) -> None:
        """Read what was begun, where no thread does: this one has time."""
        if self._arguments is not None and self._coming is None:
            self._coming = Future()
            self._coming.set_result(self._read(*self._arguments))

    def take(self, *arguments: Any) -> Item:
        """Return the result of a call: of the one begun, where it is the same, or of a new one."""
        if self._arguments != arguments:
            self.begin(*arguments)
        coming, self._arguments, self._coming = self._coming, None, None
        return self._read(*arguments) if coming is None else coming.result()

    def forget(self) -> None:
        """Drop what was begun. Returns when nothing is being read."""
        coming, self._arguments, self._coming = self._coming, None, None
        if coming is not None and not coming.cancel():
            coming.exception()

    def close(self) -> None:
        """Drop what was begun, and end the thread."""
        self.forget()
        if self._thread is not None:
            self._thread.shutdown()


def may_read_in_a_thread(source: Any) -> bool:
    """Return whether a source says that any thread may read it: its rows touch nothing that threads share.

    Not so a user's data set: Python's, numpy's and torch's random generators are set for each of its rows, and the
    thread that trains draws from the same ones.
    """
    return bool(getattr(source, "reads_in_threads", False))
