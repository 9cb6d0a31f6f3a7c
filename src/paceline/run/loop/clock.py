"""The clock of a step: where its wall time goes."""

from __future__ import annotations

import time
from typing import Any

import torch


class PhaseClock:
    """Splits a step's wall time into named phases; on CUDA by events, so that nothing waits for the device.

    On a CPU this thread computes forward and backward itself, so the time in which it did not run is time that it
    waited: in a collective, whose transfers other threads make, or for a core.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._ran: list[float] = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """Say that `phase` ends here."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))
            self._ran.append(time.thread_time())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase. On CUDA the device must have passed the last mark."""
        spans: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            span = before.elapsed_time(after) / 1e3 if self._cuda else after - before
            spans[phase] = spans.get(phase, 0.0) + span
        return spans

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
