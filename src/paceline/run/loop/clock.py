"""The clock of a step: where its wall time goes."""

from __future__ import annotations

import time
from typing import Any

import torch

BETWEEN = ""  # what lies between two steps is part of neither


class PhaseClock:
    """Splits steps' wall time into named phases; on CUDA by events, so that nothing waits for the device.

    The device may still be at the end of a step when the host asks what the step took. What the device has not passed
    is told with the next step; summed up over steps nothing is lost but the end of the last one.

    On a CPU this thread computes forward and backward itself, so the time in which it did not run is time that it
    waited: in a collective, whose transfers other threads make, or for a core.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._ran: list[float] = []
        self._phases: list[str] = []  # seen so far
        self._idle: float | None = None

    def begin(self) -> None:
        """Say that a step begins here."""
        if not self._cuda:  # a step that failed has told nothing, and tells nothing of the next one
            self._marks.clear()
            self._ran.clear()
        self.mark(BETWEEN)

    def mark(self, phase: str) -> None:
        """Say that `phase` ends here."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))
            self._ran.append(time.thread_time())
        if phase != BETWEEN and phase not in self._phases:
            self._phases.append(phase)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase that has ended since the last call; 0 of one that the device is still in."""
        passed = len(self._marks)
        while self._cuda and passed > 1 and not self._marks[passed - 1][1].query():
            passed -= 1
        spans = dict.fromkeys(self._phases, 0.0)
        self._idle = 0.0 if self._cuda else None
        for (_, before), (phase, after) in zip(self._marks[:passed], self._marks[1:passed], strict=False):
            seconds = before.elapsed_time(after) / 1e3 if self._cuda else after - before
            if phase != BETWEEN:
                spans[phase] += seconds
            elif self._idle is not None:
                self._idle += seconds
        self._marks, self._ran = self._marks[passed - 1 :], self._ran[passed - 1 :]
        return spans

    def idle_seconds(self) -> float | None:
        """Return for how long the device had nothing to do between the steps last taken; None on a CPU.

        An evaluation or a checkpoint between two steps counts as well: the clock does not know what they launch.
        """
        return self._idle

    def waiting_seconds(self, *phases: str) -> float | None:
        """Return the part of phases in which this thread did not run; None on CUDA, where it is not known."""
        if self._cuda:
            return None
        pairs = zip(self._marks, self._marks[1:], self._ran, self._ran[1:], strict=False)
        return sum(
            max(0.0, after - before - (ran - since))
            for (_, before), (phase, after), since, ran in pairs
            if phase in phases
        )
