"""A thread prints what this process prints: a reader that is slow, or takes nothing, holds nobody up.

A supervisor that stands in a write to a full pipe, or to a terminal that is stopped, looks after no rank. So lines wait
in memory, so many bytes of each stream. Of more the oldest go, those of ranks before the supervisor's own, and how many
is said where they would have stood; the journal, and the logs of ranks, have what they tell.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

LIMIT_BYTES = 1 << 20  # that wait, of each stream, of ranks and of this process each
PIECE_BYTES = select.PIPE_BUF  # of one write: a pipe that has room at all takes so much at once (pipe(7))
LOOK_SECONDS = 0.2  # between two looks at a stream that takes nothing
AT_ONCE_SECONDS = 0.002  # that who prints waits for the thread: a file, or a reader that reads, has it at once
AGAIN_SECONDS = 1.0  # after which a disk that took nothing is tried again
END_SECONDS = 60.0  # at the end, for a reader that has taken nothing meanwhile


class _Pieces:
    """What waits, of ranks or of this process: pairs (number of the piece, bytes)."""

    def __init__(self) -> None:
        self.pieces: deque[tuple[int, bytes]] = deque()
        self._size = 0

    def add(self, number: int, data: bytes, limit: int) -> int:
        """Take a piece, leave the oldest out of what is too much, and return how many lines that were.

        The newest piece stays, however long it is.
        """
        self.pieces.append((number, data))
        self._size, lines = self._size + len(data), 0
        while len(self.pieces) > 1 and self._size > limit:
            lines += self.take()[1].count(b"\n")
        return lines

    def take(self) -> tuple[int, bytes]:
        """Return the oldest piece, which waits no more."""
        number, data = self.pieces.popleft()
        self._size -= len(data)
        return number, data


@dataclass
class _Stream:
    """What waits for one stream, which is printed in the order of the pieces' numbers."""

    own: _Pieces = field(default_factory=_Pieces)
    of_ranks: _Pieces = field(default_factory=_Pieces)
    at_hand: tuple[int, bytes] | None = None  # is being written
    left_out: int = 0  # lines, since the last piece that was printed
    ends_line: bool = True
    again: float = 0.0  # when it may be tried again
    is_slow: bool = False  # has taken nothing at the last look
    has_failed: bool = False  # a disk took nothing
    broken: OSError | None = None  # its reader has left

    @property
    def next(self) -> int | None:
        """The number of the piece that comes next."""
        if self.at_hand is not None:
            return self.at_hand[0]
        return min((each.pieces[0][0] for each in (self.own, self.of_ranks) if each.pieces), default=None)

    def take(self) -> bytes:
        """Return what comes next, which stays at hand until it is written."""
        if self.at_hand is None:
            is_own = bool(self.own.pieces) and self.own.pieces[0][0] == self.next
            number, data = (self.own if is_own else self.of_ranks).take()
            if self.left_out:
                note = f"note     {self.left_out} lines are left out here: nobody read them\n"
                data = (b"" if self.ends_line else b"\n") + note.encode() + data
                self.left_out = 0
            self.at_hand = number, data
        return self.at_hand[1]

    def written(self, count: int) -> None:
        """Note that so many bytes of what is at hand are written."""
        assert self.at_hand is not None
        number, data = self.at_hand
        self.ends_line = data[count - 1 : count] == b"\n" if count else self.ends_line
        self.at_hand = (number, data[count:]) if count < len(data) else None
        self.is_slow = self.has_failed = False


class Printer:
    """The thread that prints, to standard output and error of this process."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit, self._number = limit_bytes, 0
        self._streams = {1: _Stream(), 2: _Stream()}
        self._direct = {number: _reopened(number) for number in self._streams}
        self.changed = threading.Condition()
        self._is_closed = self._is_given_up = False
        self.is_over = False  # nothing is printed by the thread any more
        self._thread = threading.Thread(target=self._run, name="paceline-printer", daemon=True)
        self._thread.start()

    def put(self, stream: int, data: bytes, is_own: bool = False) -> None:
        """Have bytes printed to a stream. Nobody is waited for. Raises BrokenPipeError where its reader has left.

        `is_own` is what this process says itself, and no rank. Of a printer that is closed the caller prints by itself.
        """
        with self.changed:
            if not self.is_over:
                self._hand_over(stream, data, is_own)
                return
        while data:
            data = data[os.write(stream, data) :]

    def _hand_over(self, stream: int, data: bytes, is_own: bool) -> None:
        """Write what is taken at once, and leave the rest to the thread. Raises BrokenPipeError."""
        waiting = self._streams[stream]
        if waiting.broken is not None:
            raise BrokenPipeError(*waiting.broken.args)
        if waiting.next is None:
            data = data[self._written_at_once(stream, data) :]
        if data:
            self._number += 1
            waiting.left_out += (waiting.own if is_own else waiting.of_ranks).add(self._number, data, self._limit)
            self.changed.notify_all()

    def _written_at_once(self, stream: int, data: bytes) -> int:
        """Write what a pipe or a terminal takes without waiting; return how much that was. Raises BrokenPipeError."""
        direct, waiting = self._direct[stream], self._streams[stream]
        if direct is None:
            return 0
        try:
            count = os.write(direct, data)
        except BrokenPipeError as error:
            waiting.broken = error
            raise
        except OSError:  # it is full, or the terminal has gone, which the thread finds out
            return 0
        waiting.ends_line = data[count - 1 : count] == b"\n" if count else waiting.ends_line
        return count

    def flush(self, stream: int) -> None:
        """Return once all is printed, or it is known that the reader is slow. Raises BrokenPipeError as `put` does."""
        with self.changed:
            waiting = self._streams[stream]
            is_settled = self.changed.wait_for(
                lambda: waiting.next is None or waiting.is_slow or waiting.has_failed or waiting.broken is not None,
                AT_ONCE_SECONDS,
            )
            waiting.is_slow |= not is_settled
            if waiting.broken is not None:
                raise BrokenPipeError(*waiting.broken.args)

    def close(self, seconds: float = END_SECONDS) -> None:
        """Print what waits. A reader that has taken nothing for so long gets no more."""
        with self.changed:
            self._is_closed = True
            for waiting in self._streams.values():
                waiting.again = 0.0  # a disk is asked once more
            self.changed.notify_all()
            moved, before = time.monotonic(), self._left()
            while before and time.monotonic() - moved < seconds:
                self.changed.wait(LOOK_SECONDS)
                if (left := self._left()) != before:
                    moved, before = time.monotonic(), left
            self._is_given_up = bool(before)
            self.changed.notify_all()
            self._wait_for_thread(2 * LOOK_SECONDS if self._is_given_up else None)  # it may stand in a write for ever
            for direct in filter(None, self._direct.values()):
                os.close(direct)
            self._direct = dict.fromkeys(self._direct)

    def _wait_for_thread(self, seconds: float | None) -> None:
        """Return when the thread prints nothing any more, or after so long.

        A join would wait without end for a thread that waits for the lock, where this thread has the lock once too
        often: a signal handler that raises just as it is taken leaves it. A wait gives it up altogether.
        """
        began = time.monotonic()
        while not self.is_over and self._thread.is_alive():
            if seconds is not None and time.monotonic() - began >= seconds:
                return
            self.changed.wait(LOOK_SECONDS)

    def _left(self) -> list[tuple[int, int | None, int]]:
        """Return what waits for a reader that may still take it: the stream, its next piece, and how long that is."""
        return [
            (number, each.next, len(each.at_hand[1]) if each.at_hand else 0)
            for number, each in self._streams.items()
            if each.next is not None and each.broken is None and not (each.has_failed and each.again)
        ]

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (due := self._due()) is not None:
            looked = select.poll()
            for number in due:
                looked.register(number, select.POLLOUT)
            ready = [number for number, _ in looked.poll(1e3 * LOOK_SECONDS)]
            with self.changed:
                for number in due:
                    self._streams[number].is_slow = number not in ready and not self._streams[number].has_failed
                self.changed.notify_all()
            if ready:
                self._write(min(ready, key=due.__getitem__))

    def _due(self) -> dict[int, int] | None:
        """Return the streams that something is to be printed to, and its number; None at the end. Waits for either."""
        with self.changed:
            while True:
                now, due = time.monotonic(), dict[int, int]()
                waits = []
                for number, each in self._streams.items():
                    if each.broken is None and (following := each.next) is not None:
                        if each.again <= now:
                            due[number] = following
                        elif not (self._is_closed and each.has_failed):
                            waits.append(each.again - now)
                if due and not self._is_given_up:
                    return due
                if self._is_given_up or (self._is_closed and not waits):
                    self.is_over = True
                    self.changed.notify_all()
                    return None
                self.changed.wait(min(waits, default=None))

    def _write(self, number: int) -> None:
        with self.changed:
            stream = self._streams[number]
            piece = stream.take()[:PIECE_BYTES]
        error: OSError | None = None
        count = 0
        try:
            count = os.write(number, piece)
        except OSError as failed:
            error = failed
        with self.changed:
            if error is None:
                stream.written(count)
            elif error.errno == errno.EPIPE:
                stream.broken, stream.at_hand, stream.own, stream.of_ranks = error, None, _Pieces(), _Pieces()
            else:  # a disk that is full, or somebody has made the stream one that does not wait
                stream.has_failed = error.errno != errno.EAGAIN
                stream.again = time.monotonic() + (AGAIN_SECONDS if stream.has_failed else LOOK_SECONDS)
            self.changed.notify_all()


class AsideStream:
    """A text stream whose text a printer prints.

    Everything else is the stream's, and so is all after a fork, and once the printer is closed: a handler of `logging`
    that was made in the meantime keeps this stream for as long as the process lives.
    """

    def __init__(self, stream: TextIO, number: int, printer: Printer) -> None:
        self._stream, self._number, self.printer = stream, number, printer
        self._rest, self._process = "", os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the printer prints here: it is not closed, and this process was not forked from its own."""
        return os.getpid() == self._process and not self.printer.is_over

    def write(self, text: str) -> int:
        """Hand text on by whole lines; what a line begins with waits for its end, or for a flush."""
        if not self.is_here:
            return self._stream.write(text)
        with self.printer.changed:
            lines, end, rest = (self._rest + text).rpartition("\n")
            self._rest = rest
            self._put(lines + end)
        if end and self._stream.line_buffering:  # as standard error is, and a terminal
            self.printer.flush(self._number)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand on what there is, and wait for a reader that reads."""
        if not self.is_here:
            self._stream.flush()
            return
        with self.printer.changed:
            rest, self._rest = self._rest, ""
            self._put(rest)
        self.printer.flush(self._number)

    def _put(self, text: str) -> None:
        if text:
            encoding, errors = self._stream.encoding or "utf-8", self._stream.errors or "backslashreplace"
            self.printer.put(self._number, text.encode(encoding, errors), is_own=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _reopened(number: int) -> int | None:
    """Return a descriptor of the same pipe or terminal that waits for nobody; None for others, and where none is given.

    Whether a descriptor waits is a matter of who has opened it, and this process shares its own with others.
    """
    try:
        kind = os.fstat(number).st_mode
        if not (stat.S_ISFIFO(kind) or os.isatty(number)):
            return None
        return os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None


@contextlib.contextmanager
def printed_aside(seconds: float = END_SECONDS) -> Iterator[Printer]:
    """Have a printer print what this process prints in the block; at its end all is printed, or nobody reads.

    Where that is so already, nothing is changed. Streams that are not those of the process, as in a notebook, stay.
    """
    known = printer_here()
    if known is not None:
        yield known
        return
    printer, before = Printer(), (sys.stdout, sys.stderr)
    for stream in filter(None, before):
        with contextlib.suppress(OSError, ValueError):  # what waits there is printed first
            stream.flush()
    now: Any = [_aside(stream, printer) for stream in before]
    sys.stdout, sys.stderr = now
    try:
        yield printer
    finally:
        for at, name in enumerate(("stdout", "stderr")):
            if getattr(sys, name) is now[at]:  # who has put another in its place has it
                setattr(sys, name, before[at])
            if isinstance(now[at], AsideStream):
                with contextlib.suppress(OSError):
                    now[at].flush()
        printer.close(seconds)


def printer_here() -> Printer | None:
    """Return what prints what this process prints, None where nothing does."""
    known = (stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, AsideStream))
    return next((stream.printer for stream in known if stream.is_here), None)


def _aside(stream: TextIO | None, printer: Printer) -> Any:
    """Return the stream as a printer prints it, where it leads to one of this process's own."""
    try:
        number = stream.fileno() if stream is not None else -1
    except (OSError, ValueError, AttributeError):
        return stream
    return AsideStream(stream, number, printer) if stream is not None and number in (1, 2) else stream
