"""ExportSink: what a tool must do to get a run's records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.spec.journal.record import Record
from paceline.spec.watch.exports import ExportsSpec


class ExportSink(Protocol):
    """A tool that takes records, in their order. It may raise anything: then it is opened anew and gets them again."""

    def send(self, records: Sequence[Record]) -> None:
        """Take records, and keep them for good before this returns."""

    def state(self) -> dict[str, object]:
        """Return what the sink must know when another process goes on for it: an id, the newest values."""

    def close(self) -> None:
        """Nothing more comes from this process."""


@dataclass(frozen=True)
class ExportedRun:
    """A run as a tool knows it."""

    dir: Path
    name: str
    exports: ExportsSpec
    say: Callable[[str], None] = lambda line: None  # of what a tool does only in part

    @property
    def project(self) -> str:
        """What the run is kept under."""
        return self.exports.project or self.name


OpenExport = Callable[[ExportedRun, dict[str, object]], ExportSink]
