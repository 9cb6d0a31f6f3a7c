"""DaemonThreads: threads that read, for which a process that ends does not wait longer than a moment.

A pool of the standard library is waited for at the end of the process, whatever its threads do: one that reads from a
storage which has fallen silent would hold a process for minutes after Ctrl-C.

A process that is forked has none of its parent's threads: what they were given is never done there, and nobody there
waits for it. The first call of its own begins new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

Result = TypeVar("Result")

LAST_SECONDS = 2.0  # that the end of a process gives to what is being read
_Call = tuple["Future[Any]", Callable[..., Any], tuple[object, ...]]


class DaemonThreads:
    """Threads of a name that make calls in the order in which they are given; they begin with the first one."""

    def __init__(self, count: int, name: str, begin: Callable[[], object] | None = None) -> None:
        """`begin` is called first in each thread."""
        self.count, self._name, self._begin = count, name, begin
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()  # whose the threads are
        self._at_exit: Callable[[], None] | None = None

    @property
    def is_inherited(self) -> bool:
        """Whether the threads are those of the process that this one was forked from."""
        return self._process != os.getpid()

    def submit(self, call: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Return the result of a call, to come."""
        if not self._threads or self.is_inherited:
            self._start()
        from concurrent.futures import Future  # 8 ms with what it loads, and a plan reads nothing in threads

        future: Future[Result] = Future()
        self._calls.put((future, call, arguments))
        return future

    def close(self, seconds: float | None = None) -> None:
        """End the threads after the calls that were given, and wait for them: for so many seconds at most."""
        threads, self._threads = self._threads, []
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None
        if self.is_inherited:
            return
        for _ in threads:
            self._calls.put(None)
        until = None if seconds is None else time.monotonic() + seconds
        for thread in threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def drop(self) -> None:
        """Cancel the calls that no thread has begun."""
        with contextlib.suppress(queue.Empty):
            while not self.is_inherited:
                if (asked := self._calls.get_nowait()) is not None:
                    asked[0].cancel()

    def _start(self) -> None:
        if self._at_exit is not None:  # of threads that a process before this one had
            atexit.unregister(self._at_exit)
        self._process, self._calls = os.getpid(), queue.SimpleQueue()
        asked = (self._calls, self._begin)
        self._threads = [
            threading.Thread(target=_work, args=asked, name=f"{self._name}_{number}", daemon=True)
            for number in range(self.count)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _end, self._calls, self.count).atexit = False
        self._at_exit = partial(_end_soon, weakref.ref(self))
        atexit.register(self._at_exit)


def _end(calls: queue.SimpleQueue[_Call | None], count: int) -> None:
    """Let threads end that nobody can give calls to any more."""
    for _ in range(count):
        calls.put(None)


def _end_soon(own: weakref.ref[DaemonThreads]) -> None:
    """Let threads end before the interpreter does: one that comes back into it later would abort the process."""
    if (threads := own()) is not None:
        threads.drop()
        threads.close(LAST_SECONDS)


def _work(calls: queue.SimpleQueue[_Call | None], begin: Callable[[], object] | None) -> None:
    failed: BaseException | None = None
    try:
        if begin is not None:
            begin()
    except BaseException as error:  # of which every call is told
        failed = error
    while (asked := calls.get()) is not None:
        future, call, arguments = asked
        if future.set_running_or_notify_cancel():
            try:
                if failed is not None:
                    raise failed
                future.set_result(call(*arguments))
            except BaseException as error:  # raised where the result is taken
                future.set_exception(error)
        del asked, future, call, arguments  # a thread that waits holds no batch
