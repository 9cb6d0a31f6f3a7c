"""Sinks: where the records of a run go. The journal is one, the status line another; whoever starts a run adds more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paceline.spec.journal.record import Record


class Sink(Protocol):
    """Takes every record of one start of a run, in order, on rank 0."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """The start has ended: no record follows."""


OpenSink = Callable[[Path], Sink]  # called with the run's directory once the start begins
