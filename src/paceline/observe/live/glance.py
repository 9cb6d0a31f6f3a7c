"""A glance at a run: how it goes, from the first record and the end of its newest start. For a table of many runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from paceline.history.records import number, table, text
from paceline.observe.live.run import RUNNING, SILENT, SILENT_SECONDS, SILENT_STEPS
from paceline.spec.journal.kinds import RunEnded, RunStarted, parse
from paceline.spec.journal.reading import parsed_line, records_in, starts_of
from paceline.spec.journal.record import number as journal_number

END_BYTES = 128 << 10  # of a journal that are read


@dataclass(frozen=True)
class Glance:
    """A run in a line. Unknown is None."""

    run_dir: Path
    task: str
    plan: str
    ended: str  # how its newest start ended; empty where there is no end on record
    step: int | None
    steps: int | None
    loss: float | None  # NaN where it is no number
    step_seconds: float | None
    forecast_seconds: float | None
    devices: int | None
    last: float | None  # when the newest record was written

    def status(self, now: float | None = None) -> str:
        """Return how the run ended; without an end on record `running`, or `silent`."""
        if self.ended or self.last is None:
            return self.ended or SILENT
        silent = max(SILENT_SECONDS, SILENT_STEPS * (self.step_seconds or 0.0))
        return SILENT if (time.time() if now is None else now) - self.last > silent else RUNNING


class Glances:
    """Glances at runs; a journal that has not grown is not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], Glance]] = {}
        self._begun: dict[tuple[Path, int], RunStarted] = {}

    def at(self, run_dir: Path) -> Glance:
        """Return a glance at a run. Raises OSError where its journal cannot be read."""
        starts = starts_of(run_dir)
        if not starts:
            return Glance(run_dir, "", "", "", None, None, None, None, None, None, None)
        path = starts[-1][1]
        status = path.stat()
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._known.get(run_dir)
        if known is None or known[0] != state:
            self._known[run_dir] = known = (state, self._read(run_dir, path, status.st_ino))
        return known[1]

    def _read(self, run_dir: Path, path: Path, inode: int) -> Glance:
        begun = self._begun.get((path, inode)) or _first(path)
        if begun is not None:
            self._begun[path, inode] = begun
        ended, step, last = "", None, None
        for line in records_in(path, END_BYTES):
            last = number(line.get("time")) or last
            if line["kind"] == "step":
                step = line
            elif line["kind"] == RunEnded.KIND:
                ended = text(line.get("status"))
        forecast = begun.forecast if begun else {}
        done = number(step.get("step")) if step else begun.step if begun else None
        steps, seconds = number(forecast.get("steps")), table(forecast.get("step_seconds"))
        return Glance(
            run_dir=run_dir,
            task=text(table(begun.spec.get("task")).get("name")) if begun else "",
            plan=begun.plan_text if begun else "",
            ended=ended,
            step=None if done is None else int(done),
            steps=None if steps is None else int(steps),
            loss=journal_number(step.get("loss")) if step else None,
            step_seconds=number(table(step.get("seconds")).get("total")) if step else None,
            forecast_seconds=number(seconds.get("value")),
            devices=begun.world_size if begun else None,
            last=last,
        )


def _first(path: Path) -> RunStarted | None:
    """Return the start that a file begins with; None where its first line is not whole yet, or another record."""
    with path.open("rb") as file:
        line = file.readline()
    found = parsed_line(line) if line.endswith(b"\n") else None
    record = parse(found) if found else None
    return record if isinstance(record, RunStarted) else None
