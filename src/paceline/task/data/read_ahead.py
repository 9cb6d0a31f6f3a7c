"""Reading ahead: what comes next is read while the device computes."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from paceline.task.data.daemons import LAST_SECONDS, DaemonThreads
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

    coming: Future[list[_Read[Item] | Exception]] | None = None  # of those that are read with it
    at: int = 0  # which of them it is
    read: _Read[Item] | None = None
    error: Exception | None = None
    sent: Item | None = None

    @property
    def is_read(self) -> bool:
        """Whether the result is there."""
        if self.coming is None:
            return self.read is not None
        done = self.coming.done() and not self.coming.cancelled() and self.coming.exception() is None
        return done and isinstance(self.coming.result()[self.at], _Read)

    @property
    def is_waiting(self) -> bool:
        """Whether nobody reads it, or has read it."""
        return self.coming is None and self.read is None and self.error is None

    def result(self) -> _Read[Item]:
        """Return what was read, once it is. Raises what the read raised."""
        if self.error is not None:
            raise self.error
        if self.read is not None:
            return self.read
        assert self.coming is not None, "nobody reads it"
        found = self.coming.result()[self.at]
        if isinstance(found, Exception):
            raise found
        return found


class ReadAhead(Generic[Item]):
    """Calls `read(*arguments)` before its result is wanted: in threads of its own, or when this one has time.

    Threads read where `prepare` is given, which is called first in each: CUDA's current device belongs to a thread. How
    many results are asked for ahead is the rule's, and so is how many a thread reads each time that it is woken;
    without a rule both are one. What a read raises is raised where its result is taken. `send` starts a result's way to
    the device, which one result at a time goes ahead of its use, and `receive` ends it. Both are called by the thread
    that takes.
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
        self._asked: dict[tuple[object, ...], _Asked[Item]] = {}  # by arguments, in the order of asking
        self._waiting: list[tuple[tuple[object, ...], _Asked[Item]]] = []  # for a thread, of those
        self._threads: DaemonThreads | None = None
        self._was_short = False
        self._taken_at: float | None = None  # when the last result was given away
        self.read_seconds = self.ready = self.takes = 0.0  # sums since `tell`: of reads, of results that were there

    @property
    def depth(self) -> int:
        """How many results are to be asked for ahead."""
        return self._rule.depth if self._rule is not None else 1

    @property
    def _together(self) -> int:
        """How many reads a thread is woken for."""
        return self._rule.together if self._rule is not None else 1

    def begin(self, *arguments: object) -> None:
        """Say what `take` will be asked for, after what was said before; a thread begins to read it.

        Short reads wait for others, that one wake-up is for several of them; what is taken before that, this thread
        reads.
        """
        if arguments in self._asked:
            return
        self._asked[arguments] = asked = _Asked[Item]()
        if self._prepare is None or not self.depth:
            return
        self._waiting.append((arguments, asked))
        if len(self._waiting) < self._together:
            return
        waiting = [each for each in self._waiting if each[1].is_waiting and self._asked.get(each[0]) is each[1]]
        if len(waiting) >= self._together:
            coming = self._pool().submit(self._timed_all, [own for own, _ in waiting])
            for at, (_, each) in enumerate(waiting):
                each.coming, each.at = coming, at
            waiting = []
        self._waiting = waiting

    def read_begun(self) -> None:
        """Read the first that was begun, where no thread does, and send it on its way: this thread has time."""
        if not self._asked:
            return
        arguments, asked = next(iter(self._asked.items()))
        if asked.is_waiting:
            try:
                asked.read = self._timed(*arguments)
            except Exception as error:  # a user's data set may raise anything; it is raised where it is taken
                asked.error = error
        if self._send is not None and asked.sent is None and asked.is_read:
            asked.sent = self._send(asked.result().item)

    def take(self, *arguments: object) -> Item:
        """Return the result of a call: of one begun, where it is among them, or of a new one."""
        if self._threads is not None and self._threads.is_inherited:
            self.forget()
        now = time.perf_counter()
        step_seconds = None if self._taken_at is None else now - self._taken_at
        while self._asked and next(iter(self._asked)) != arguments:  # passed over, or of a plan that is no more
            if arguments not in self._asked:
                self.forget()
                break
            passed = self._asked.pop(next(iter(self._asked))).coming
            if passed is not None and all(each.coming is not passed for each in self._asked.values()):
                passed.cancel()
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

    def forget(self, seconds: float | None = None) -> None:
        """Drop what was begun. Returns when nothing is being read, or after so many seconds.

        What the process before a fork has begun is not read in this one, so that it is not waited for.
        """
        asked, self._asked, self._waiting = self._asked, {}, []
        if self._threads is not None and self._threads.is_inherited:
            self._threads = None
            return
        coming = [each.coming for each in asked.values() if each.coming is not None and not each.coming.cancel()]
        wait(coming, seconds)

    def close(self) -> None:
        """Drop what was begun, and end the threads. One whose storage is silent is left behind after a moment."""
        self.forget(LAST_SECONDS)
        if self._threads is not None:
            self._threads.close(LAST_SECONDS)
            self._threads = None

    def _timed_all(self, calls: Sequence[tuple[object, ...]]) -> list[_Read[Item] | Exception]:
        """Read several, one after the other; return what they are, or what reading them has raised."""
        found = list[_Read[Item] | Exception]()
        for arguments in calls:
            try:
                found.append(self._timed(*arguments))
            except Exception as error:  # a user's data set may raise anything; it is raised where it is taken
                found.append(error)
        return found

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

    def _pool(self) -> DaemonThreads:
        """Return the threads: as many as results are asked for ahead, since reads that wait, wait beside each other.

        Reads of which one wake-up is for several compute: one thread makes them, in their order.
        """
        workers = max(1, self.depth if self._together == 1 else 1)
        if self._threads is None or self._threads.count != workers:
            if self._threads is not None:
                self._threads.close(0.0)  # what they were given they still read
            self._threads = DaemonThreads(workers, THREAD_NAME, self._prepare)
        return self._threads


def _times_waited() -> int:
    """Return how often this thread has given up its core by itself: to wait for a disk, a lock or another thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def may_read_in_a_thread(source: object) -> bool:
    """Return whether a source says that any thread may read it: its rows touch nothing that threads share.

    Not so a user's data set: Python's, numpy's and torch's random generators are set for each of its rows, and the
    thread that trains draws from the same ones.
    """
    return bool(getattr(source, "reads_in_threads", False))
