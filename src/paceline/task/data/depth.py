"""DepthRule: how many batches are read ahead, by what steps and reads take and what memory allows."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.spec.journal.kinds import DecisionRecord
from paceline.units import format_bytes, format_durations

MOST_AHEAD = 16  # batches: more hides no longer pauses, and holds what may never be trained on
WINDOW = 8  # reads and steps that a change is of
LOOK_SECONDS = 5e-3  # of steps and reads, between two looks at least: one takes as long as a read of a few rows
WORTH_A_THREAD = 0.05  # of a step: reads that wait less than this are left to the thread that trains
WAKE_UP = 0.5e-3  # seconds of reading that a thread is woken for beside a device: a wake-up takes 0.1 ms of the cores
SHORT_READ = 150e-6  # seconds: a thread that hands a batch over takes as much of the cores (benchmarks/results/data.md)
MUCH_MORE = 1.5  # times as many reads for a wake-up are worth a change by themselves
WAITS = 0.5  # of a read: less waiting than this, and a thread would only take the cores that compute


class ReadTimes(NamedTuple):
    """What a read took, in seconds, of which its thread did not run for `waited`.

    `step` is the time from the result before to this one being asked for, None for the first. `in_thread` says whether
    another thread read it.
    """

    read: float
    waited: float
    step: float | None
    in_thread: bool


class DepthRule:
    """Looks at reads and steps, and changes `depth` where it is not what they call for. It changes what is read when,
    never what: samples are pure functions of their position.

    As many batches are asked for as steps pass in the longest read. Where a device computes, one at least is, but for
    reads so short that waking a thread costs more: the thread that trains reads those while the device computes. Of
    somewhat longer ones a thread reads several, `together`, each time that it is woken, and twice as many are asked for
    ahead. On a CPU, whose cores all compute, none is as long as reads compute too: what a thread can hide there is
    their waiting.
    """

    def __init__(
        self, most_bytes: int, on_device: bool, bytes_of: Callable[[Any], int], short_read: float = SHORT_READ
    ) -> None:
        """`most_bytes` is what batches ahead may take; `bytes_of` says what one does."""
        self.depth = self._least = 1 if on_device else 0
        self.together, self._short_read = 1, short_read
        self._most_bytes, self._on_device, self._bytes_of = most_bytes, on_device, bytes_of
        self._times: deque[ReadTimes] = deque(maxlen=WINDOW)
        self._batch_bytes = 0
        self._unseen, self._seconds = 0, 0.0  # reads since the last look, and how long they and their steps took
        self._news: list[DecisionRecord] = []

    def seen(self, item: object, times: ReadTimes) -> None:
        """Take note of a read, and of the step before it."""
        if times.step is None:
            return
        self._times.append(times)
        self._unseen += 1
        self._seconds += times.step + times.read
        if self._unseen < WINDOW or self._seconds < LOOK_SECONDS:
            return
        self._unseen, self._seconds = 0, 0.0
        self._batch_bytes = max(self._batch_bytes, self._bytes_of(item))
        wanted, allowed = self._wanted(), self._allowed()
        chosen = min(wanted, allowed)
        together = max(1, min(self._worth_a_wake_up(), chosen // 2))
        # It grows at once and shrinks when it is twice what is called for: no change follows from noise alone.
        grows = chosen > self.depth or (chosen == self.depth and together >= MUCH_MORE * self.together)
        if grows or self.depth >= 2 * max(1, chosen) or (self.depth and not chosen):
            self._change(chosen, together, wanted, allowed)

    def news(self) -> list[DecisionRecord]:
        """Return the changes since the last call."""
        news, self._news = self._news, []
        return news

    def _wanted(self) -> int:
        step = statistics.median(times.step or 0.0 for times in self._times)
        longest = max(times.read for times in self._times)
        # On average: a read may gather what several after it need (task/data/rows_together.py).
        if self._on_device and self._mean() < self._short_read:
            return 0
        if not self._on_device:
            waited = statistics.median(times.waited for times in self._times)
            read = statistics.median(times.read for times in self._times)
            if waited < WAITS * read or waited < WORTH_A_THREAD * step:
                return 0
        steps = math.ceil(longest / step) if step > 0 else MOST_AHEAD
        worth = self._worth_a_wake_up()
        return max(1, min(MOST_AHEAD, steps), 2 * worth if worth > 1 else 1)

    def _mean(self) -> float:
        return statistics.fmean(times.read for times in self._times)

    def _worth_a_wake_up(self) -> int:
        """Return how many reads a thread is woken for: one of those that wait, which wait beside each other."""
        return max(1, min(MOST_AHEAD, int(WAKE_UP / max(self._mean(), 1e-9)))) if self._on_device else 1

    def _allowed(self) -> int:
        return max(self._least, self._most_bytes // max(1, self._batch_bytes))

    def _change(self, chosen: int, together: int, wanted: int, allowed: int) -> None:
        step = statistics.median(times.step or 0.0 for times in self._times)
        read = max(times.read for times in self._times)
        because = "reads take up to {}, steps {}".format(*format_durations(read, step))
        if allowed < wanted:
            because += f"; {wanted} would not fit into {format_bytes(self._most_bytes)} (run.read_ahead_limit)"
        elif not chosen and self._on_device:
            because += "; waking a thread costs more, and the thread that trains reads while the device computes"
        elif not chosen:
            because += "; reads compute more than they wait, and the cores compute already"
        because += f"; a thread reads {together} each time that it is woken" if together > 1 else ""
        evidence = {
            "read_seconds": read,
            "step_seconds": step,
            "waited_seconds": statistics.median(times.waited for times in self._times),
            "batch_bytes": self._batch_bytes,
        }
        told = DecisionRecord("read ahead", _batches(self.depth), _batches(chosen), because, evidence)
        self._news.append(told)
        self.depth, self.together = chosen, together
        self._times.clear()


def _batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"
