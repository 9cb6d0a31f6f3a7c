"""Journal lines that wait for a disk: in order and bounded, so that a disk that stays away ends no run."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

MOST_LINES = 10_000
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class HeldLine:
    """A line, the kind of its record, and the step that it tells of where it is a step's record."""

    kind: str
    line: bytes
    step: int | None = None


class HeldLines:
    """Lines that are to be written, the oldest first.

    Where there are too many, every second step of those that wait is left out, again and again: of a long time without
    a disk the outline stays. Where steps are not the most of them, every second line but the first
    of a start and notes of how the clock was set.
    """

    def __init__(self, most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> None:
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self._lines: deque[HeldLine] = deque()
        self._bytes = self._written = 0  # the second of the oldest line
        self._left_out: Counter[str] = Counter()
        self._changing = threading.Lock()  # they may be written in a thread (errand.py) while others come
        self._steps: list[int] = []  # the first and the last step that was left out

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def left_out(self) -> Mapping[str, int]:
        """How many records of each kind were left out since `forget_gaps`."""
        return dict(self._left_out)

    @property
    def steps_left_out(self) -> tuple[int, int] | None:
        """The first and the last step of which the record was left out, None where none was."""
        return (min(self._steps), max(self._steps)) if self._steps else None

    def forget_gaps(self) -> None:
        """Count what is left out from now on: what was is on record."""
        self._left_out.clear()
        self._steps = []

    def add(self, held: HeldLine) -> None:
        """Take a line, and leave others out where there are too many."""
        with self._changing:
            self._lines.append(held)
            self._bytes += len(held.line)
            if len(self._lines) > self._most_lines or self._bytes > self._most_bytes:
                self._thin()

    def write_to(self, descriptor: int) -> None:
        """Write all lines, each in one write where the disk takes it. Raises OSError; what is not written stays."""
        while self._lines:
            line = self._lines[0].line
            written = os.write(descriptor, line[self._written :] if self._written else line)
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with self._changing:  # the oldest line is never left out meanwhile
                self._written += written
                if self._written == len(line):
                    self._lines.popleft()
                    self._bytes -= len(line)
                    self._written = 0

    def begin_anew(self, before: bytes) -> None:
        """Write the oldest line from its beginning, in a file that has been opened anew, after `before`."""
        with self._changing:
            self._written = 0
            if self._lines and self._lines[0].kind == "":
                self._bytes -= len(self._lines.popleft().line)  # what was put before it the last time
            if not any(held.kind == "run_started" for held in self._lines):
                self._lines.appendleft(HeldLine("", before))
                self._bytes += len(before)

    def _thin(self) -> None:
        between = list(self._lines)[1:-1]  # the oldest line may be half written
        may_go = [held for held in between if held.kind == "step"]
        if 2 * len(may_go) < len(self._lines):
            may_go = [held for held in between if held.kind not in ("", "run_started", "clock")]
        gone = set(map(id, may_go[1::2]))
        for held in may_go[1::2]:
            self._left_out[held.kind] += 1
            self._bytes -= len(held.line)
            self._steps += [] if held.step is None else [held.step]
        self._steps = [min(self._steps), max(self._steps)] if self._steps else []
        self._lines = deque(held for held in self._lines if id(held) not in gone)
