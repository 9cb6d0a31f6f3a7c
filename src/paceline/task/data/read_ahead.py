"""Reading ahead: what comes next is read while the device computes."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from paceline.task.data.depth import SHORT_READ, DepthRule, ReadTimes

THREAD_NAME = "paceline-read"
Item = TypeVar("Item")


class _Read(NamedTuple, Generic[Item]):
    """What was read, and what that took: `waited` of `seconds` the thread did not run."""

    item: Item
    seconds: float
    waited: float


@dataclass(slots=True)
class _Asked(Generic[Item]):
    """What was asked for ahead: being read by a thread, read or failed in this one, or on its way to the device."""

    coming: Future[_Read[Item]] | None = None
    read: _Read[Item] | None = None
    error: Exception | None = None
    sent: Item | None = None

    @property
    def is_read(self) -> bool:
        """Whether the result is there."""
        return self.read is not None or (self.coming is not None and _is_read(self.coming))

    def result(self) -> _Read[Item]:
        """Return what was read, once it is. Raises what the read raised."""
        if self.error is not None:
            raise self.error
        if self.read is not None:
            return self.read
        assert self.coming is not None, "nobody reads it"
        return self.coming.result()


class ReadAhead(Generic[Item]):
    """Calls `read(*arguments)` before its result is wanted: in threads of its own, or when this one has time.

    Threads read where `prepare` is given, which is called first in each: CUDA's current device belongs to a thread. How
    many results are asked for ahead is the rule's; without a rule it is the next one. What a read raises is raised
    where its result is taken. `send` starts a result's way to the device, which one result at a time goes ahead of its
    use, and `receive` ends it. Both are called by the thread that takes.
    """

    def __init__(
        self,
        read: Callable[..., Item],
        prepare: Callable[[], object] | None = None,
        rule: DepthRule | None = None,
        send: Callable[[Item], Item] | None = None,
        receive: Callable[[Item], Item] | None = None,
    ) -> None:
        self._read, self._prepare, self._rule = read, prepare, rule
        self._send, self._receive = send, receive
        self._asked: dict[Hashable, _Asked[Item]] = {}  # by arguments, in the order of asking
        self._threads: ThreadPoolExecutor | None = None
        self._workers, self._was_short = 0, False
        self._taken_at: float | None = None  # when the last result was given away
        self.read_seconds = self.ready = self.takes = 0.0  # sums since `tell`: of reads, of results that were there

    @property
    def depth(self) -> int:
        """How many results are to be asked for ahead."""
        return self._rule.depth if self._rule is not None else 1

    def begin(self, *arguments: object) -> None:
        """Say what `take` will be asked for, after what was said before; a thread begins to read it."""
        if arguments in self._asked:
            return
        self._asked[arguments] = asked = _Asked[Item]()
        if self._prepare is not None and self.depth:
            asked.coming = self._pool().submit(self._timed, *arguments)

    def read_begun(self) -> None:
        """Read the first that was begun, where no thread does, and send it on its way: this thread has time."""
        if not self._asked:
            return
        arguments, asked = next(iter(self._asked.items()))
        if asked.coming is None and asked.read is None and asked.error is None:
            try:
                asked.read = self._timed(*arguments)  # type: ignore[misc]
            except Exception as error:  # a user's data set may raise anything; it is raised where it is taken
                asked.error = error
        if self._send is not None and asked.sent is None and asked.is_read:
            asked.sent = self._send(asked.result().item)

    def take(self, *arguments: object) -> Item:
        """Return the result of a call: of one begun, where it is among them, or of a new one."""
        now = time.perf_counter()
        step_seconds = None if self._taken_at is None else now - self._taken_at
        while self._asked and next(iter(self._asked)) != arguments:  # passed over, or of a plan that is no more
            if arguments not in self._asked:
                self.forget()
                break
            self._drop(self._asked.pop(next(iter(self._asked))))
        self.begin(*arguments)
        asked = self._asked.pop(arguments)
        in_thread, begun = asked.coming is not None, asked.read is not None or asked.error is not None
        self.ready += begun or (asked.coming is not None and asked.coming.done())
        self.takes += 1
        read = asked.result() if in_thread or begun else self._timed(*arguments)
        self.read_seconds += read.seconds
        item = asked.sent if asked.sent is not None else read.item if self._send is None else self._send(read.item)
        if self._rule is not None:
            self._rule.seen(read.item, ReadTimes(read.seconds, read.waited, step_seconds, in_thread))
        self._taken_at = time.perf_counter()
        return item if self._receive is None else self._receive(item)

    def tell(self) -> dict[str, float]:
        """Return means since the last call: seconds of a read, the share of results that were there, the depth."""
        if not self.takes:
            return {}
        found = {"read": self.read_seconds / self.takes, "ready": self.ready / self.takes}
        self.read_seconds = self.ready = self.takes = 0.0
        return {**found, "depth": float(self.depth)}

    def forget(self) -> None:
        """Drop what was begun. Returns when nothing is being read."""
        asked, self._asked = self._asked, {}
        for each in asked.values():
            self._drop(each)

    def close(self) -> None:
        """Drop what was begun, and end the threads."""
        self.forget()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads, self._workers = None, 0

    def _drop(self, asked: _Asked[Item]) -> None:
        if asked.coming is not None and not asked.coming.cancel():
            asked.coming.exception()

    def _timed(self, *arguments: object) -> _Read[Item]:
        """Read, and measure. A source's own threads may compute while this one waits: no core is idle then.

        After a read as short as the clocks take to look at, only the time is taken: no thread would hide its waiting.
        """
        began = time.perf_counter()
        if self._was_short:
            item = self._read(*arguments)
            seconds = time.perf_counter() - began
            self._was_short = seconds < SHORT_READ
            return _Read(item, seconds, 0.0)
        clock = time.thread_time if self._is_reader() else time.process_time
        ran, switches = clock(), _times_waited()
        item = self._read(*arguments)
        seconds, ran = time.perf_counter() - began, clock() - ran
        self._was_short = seconds < SHORT_READ
        # Who never gave up its core by itself was only kept from it: the machine is busy, and nothing was waited for.
        waited = max(0.0, seconds - ran) if _times_waited() > switches else 0.0
        return _Read(item, seconds, waited)

    def _is_reader(self) -> bool:
        return threading.current_thread().name.startswith(THREAD_NAME)

    def _pool(self) -> ThreadPoolExecutor:
        """Return the threads, as many as results are asked for ahead: reads that wait, wait beside each other."""
        if self._threads is None or self._workers < self.depth:
            if self._threads is not None:
                self._threads.shutdown(wait=False)  # what they were given they still read
            self._workers = max(1, self.depth)
            self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix=THREAD_NAME, initializer=self._prepare)
        return self._threads


def _times_waited() -> int:
    """Return how often this thread has given up its core by itself: to wait for a disk, a lock or another thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _is_read(coming: Future[Any]) -> bool:
    return coming.done() and not coming.cancelled() and coming.exception() is None


def may_read_in_a_thread(source: object) -> bool:
    """Return whether a source says that any thread may read it: its rows touch nothing that threads share.

    Not so a user's data set: Python's, numpy's and torch's random generators are set for each of its rows, and the
    thread that trains draws from the same ones.
    """
    return bool(getattr(source, "reads_in_threads", False))
