"""Reading ahead: what comes next is read while the device computes."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, NamedTuple, TypeVar

from paceline.task.data.daemons import LAST_SECONDS, DaemonThreads
from paceline.task.data.depth import SHORT_READ, DepthRule, ReadTimes

THREAD_NAME = "paceline-read"
Item = TypeVar("Item")
Call = tuple[Any, ...]  # the arguments of a read
BeginsReads = Callable[[Sequence[Call]], Sequence[Callable[[], Item]] | None]


class _Read(NamedTuple, Generic[Item]):
    """What was read, and what that took: `waited` of `seconds` the thread did not run."""

    item: Item
    seconds: float
    waited: float

    def result(self) -> _Read[Item]:
        """Return this read itself: it has been made, and there is nothing to wait for."""
        return self


class _BegunRead(NamedTuple, Generic[Item]):
    """A read of which the waiting is over, and what that took; what is left is done by whoever takes it."""

    finish: Callable[[], Item]
    seconds: float
    waited: float

    def result(self) -> _Read[Item]:
        """Return what was read."""
        began = time.perf_counter()
        item = self.finish()
        return _Read(item, self.seconds + time.perf_counter() - began, self.waited)


class _Failed(NamedTuple):
    """A read that has raised an error."""

    error: Exception

    def result(self) -> _Read[Any]:
        """Raise the error: it is of whoever takes what was to be read."""
        raise self.error


class _Group(Generic[Item]):
    """Calls that a thread makes together, and what they have given, once it has made them."""

    __slots__ = ("calls", "found", "future")

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.found: dict[Call, _Read[Item] | _BegunRead[Item] | _Failed] | None = None
        self.future: Future[None]  # of all of them


class ReadAhead(Generic[Item]):
    """Calls `read(*arguments)` before its result is wanted: in threads of its own, or when this one has time.

    Threads read where `prepare` is given, which is called first in each: CUDA's current device belongs to a thread. How
    many results are asked for ahead is the rule's, and so is how many a thread reads each time that it is woken;
    without a rule both are one. Several it only begins, by `begin_reads(calls)`, where that is given and not None comes
    of it: what finishes each of them is called where its result is taken. What a read raises is raised there too.
    `send` starts a result's way to the device, which one result at a time goes ahead of its use, and `receive` ends it.
    Both are called by the thread that takes.
    """

    def __init__(
        self,
        read: Callable[..., Item],
        prepare: Callable[[], object] | None = None,
        rule: DepthRule | None = None,
        send: Callable[[Item], Item] | None = None,
        receive: Callable[[Item], Item] | None = None,
        begin_reads: BeginsReads[Item] | None = None,
    ) -> None:
        self._read, self._prepare, self._rule = read, prepare, rule
        self._send, self._receive, self._begin_reads = send, receive, begin_reads
        # By arguments, in the order of asking; None of what nobody reads yet.
        self._asked: dict[Call, _Read[Item] | _Failed | _Group[Item] | None] = {}
        self._waiting: dict[Call, None] = {}  # for a thread, of those, and of some that were passed over
        self._sent: Item | None = None  # the first of those, on its way to the device
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

    def begin(self, *arguments: Any) -> None:
        """Say what `take` will be asked for, after what was said before; a thread begins to read it.

        Short reads wait for others, that one wake-up is for several of them; what is taken before that, this thread
        reads.
        """
        if arguments in self._asked:
            return
        self._asked[arguments] = None
        if self._prepare is None or not self.depth:
            return
        self._waiting[arguments], together = None, self._together
        if len(self._waiting) < together:
            return
        unread = [each for each in self._waiting if each in self._asked and self._asked[each] is None]
        if len(unread) >= together:
            group = _Group[Item](unread)
            group.future = self._pool().submit(self._make, group)
            self._asked.update(dict.fromkeys(unread, group))
            unread = []
        self._waiting = dict.fromkeys(unread)

    def read_begun(self) -> None:
        """Read the first that was begun, where no thread does, and send it on its way: this thread has time."""
        if not self._asked:
            return
        arguments = next(iter(self._asked))
        found = self._asked[arguments]
        if found is None:
            found = self._asked[arguments] = self._tried(arguments)
        if isinstance(found, _Group) and self._send is not None:
            begun = None if found.found is None else found.found[arguments]
            if isinstance(begun, _BegunRead):
                begun = self._finished(begun)
            found = found if begun is None else begun
            self._asked[arguments] = found
        if self._send is not None and self._sent is None and isinstance(found, _Read):
            self._sent = self._send(found.item)

    def take(self, *arguments: Any) -> Item:
        """Return the result of `read(*arguments)`, which may have begun before; else it is called now."""
        now = time.perf_counter()
        step_seconds = None if self._taken_at is None else now - self._taken_at
        if self._asked and next(iter(self._asked)) != arguments:
            self._pass_over(arguments)
        if arguments not in self._asked:
            self.begin(*arguments)
        asked, sent = self._asked.pop(arguments), self._sent
        in_thread, self._sent = isinstance(asked, _Group), None
        self.takes += 1
        if isinstance(asked, _Group):
            self.ready += asked.found is not None
            read = self._read_in(asked, arguments)
        else:
            self.ready += asked is not None
            read = self._timed(*arguments) if asked is None else asked.result()
        self.read_seconds += read.seconds
        item = sent if sent is not None else read.item if self._send is None else self._send(read.item)
        if self._rule is not None:
            self._rule.seen(read.item, ReadTimes(read.seconds, read.waited, step_seconds, in_thread))
        self._taken_at = time.perf_counter()
        return item if self._receive is None else self._receive(item)

    def _read_in(self, group: _Group[Item], arguments: Call) -> _Read[Item]:
        """Return what a thread has read, once it has. Raises what the read raised."""
        if group.found is None:
            if self._threads is not None and self._threads.is_inherited:
                self.forget()
                return self._timed(*arguments)
            group.future.result()
        assert group.found is not None, "its calls were made"
        return group.found[arguments].result()

    def _pass_over(self, arguments: Call) -> None:
        """Drop what was begun before a call, all of it where that was not begun: it is of a plan that is no more."""
        while self._asked and next(iter(self._asked)) != arguments:
            if arguments not in self._asked:
                self.forget()
                break
            passed, self._sent = self._asked.pop(next(iter(self._asked))), None
            if isinstance(passed, _Group) and all(each is not passed for each in self._asked.values()):
                passed.future.cancel()

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
        asked, self._asked, self._waiting, self._sent = self._asked, {}, {}, None
        if self._threads is not None and self._threads.is_inherited:
            self._threads = None
            return
        coming = {each.future for each in asked.values() if isinstance(each, _Group)}
        wait([future for future in coming if not future.cancel()], seconds)

    def close(self) -> None:
        """Drop what was begun, and end the threads. One whose storage is silent is left behind after a moment."""
        self.forget(LAST_SECONDS)
        if self._threads is not None:
            self._threads.close(LAST_SECONDS)
            self._threads = None

    def _make(self, group: _Group[Item]) -> None:
        """Make the calls of a group, or begin them; what they are, or have raised, it has from then on.

        Where they cannot be begun together, each is made by itself: what is wrong with one is said of that one.
        """
        found: Sequence[_Read[Item] | _BegunRead[Item] | _Failed] = ()
        if self._begin_reads is not None and len(group.calls) > 1:
            with contextlib.suppress(Exception):  # a user's data set may raise anything; it is raised again below
                begun = self._timed_by(self._begin_reads, group.calls)
                share = 1 / len(group.calls)
                found = [_BegunRead(finish, share * begun.seconds, share * begun.waited) for finish in begun.item or ()]
        found = found or [self._tried(arguments) for arguments in group.calls]
        group.found = dict(zip(group.calls, found, strict=True))

    def _finished(self, read: _BegunRead[Item]) -> _Read[Item] | _Failed:
        try:
            return read.result()
        except Exception as error:  # a user's data set may raise anything; it is raised where it is taken
            return _Failed(error)

    def _tried(self, arguments: Call) -> _Read[Item] | _Failed:
        try:
            return self._timed(*arguments)
        except Exception as error:  # a user's data set may raise anything; it is raised where it is taken
            return _Failed(error)

    def _timed(self, *arguments: Any) -> _Read[Item]:
        """Read, and measure. After a read as short as the clocks take to look at, only the time is taken: no thread
        would hide its waiting."""
        if not self._was_short:
            return self._timed_by(self._read, *arguments)
        began = time.perf_counter()
        item = self._read(*arguments)
        seconds = time.perf_counter() - began
        self._was_short = seconds < SHORT_READ
        return _Read(item, seconds, 0.0)

    def _timed_by(self, read: Callable[..., Any], *arguments: Any) -> _Read[Any]:
        """Read, and measure how long that waited. A source's own threads may compute while this one waits: no core is
        idle then."""
        clock = time.thread_time if self._is_reader() else time.process_time
        began, ran, switches = time.perf_counter(), clock(), _times_waited()
        item = read(*arguments)
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
