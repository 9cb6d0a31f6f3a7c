"""Threads that never keep a process from ending: storage that hangs holds the thread, and the process ends.

Those of `concurrent.futures` are waited for when the interpreter ends, however long a disk takes to answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MOST_THREADS = 8  # that work on one file: more of them wait for the same disk


def at_once() -> int:
    """Return how many pieces of files this process works on at once: as many as it computes with threads, and two.

    One waits for the disk while the other hashes.
    """
    return max(2, min(MOST_THREADS, torch.get_num_threads()))


class Hands:
    """A few daemon threads that take calls in turn; used in a `with`, which waits for what was handed in.

    Where there are none, who hands a call in makes it: for little work that is sooner done than a thread is started.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread make the call; the future has what it returned or raised."""
        future: Future[T] = Future()
        if self._threads:
            self._calls.put((future, call, arguments))
        else:
            _make(future, call, arguments)
        return future

    def _work(self) -> None:
        while (handed := self._calls.get()) is not None:
            _make(*handed)
            del handed  # or an idle thread would hold what it wrote last

    def __enter__(self) -> Hands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()


def _make(future: Future[Any], call: Callable[..., object], arguments: tuple[object, ...]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)
