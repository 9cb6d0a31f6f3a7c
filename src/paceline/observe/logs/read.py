"""Reading the logs of a run's ranks: files that were set aside first, the newest last. Torch-free."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.spec.journal.kinds import FaultRecord, RunEnded
from paceline.spec.journal.reading import records_in, starts_of
from paceline.spec.journal.record import read
from paceline.supervise.logs.files import ERR, FOLDER, OUT, log_path

_NAME = re.compile(r"rank-([0-9]+)\.log(?:\.([0-9]+))?")
LAST_BYTES = 1 << 18  # of a start's journal that are looked at for how it ended


@dataclass(frozen=True)
class LogLine:
    """One line that a rank has printed: when, as UTC text, and to which stream."""

    rank: int
    time: str
    stream: str
    text: str


@dataclass(frozen=True)
class FirstFailure:
    """What failed first in the newest start: the rank where it is known, and the traceback where there is one."""

    rank: int | None
    what: str
    because: str
    traceback: str


def ranks_with_logs(run_dir: Path) -> list[int]:
    """Return the ranks that have logs, in order."""
    folder = run_dir / FOLDER
    names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted({int(match[1]) for match in names if match})


def files_of(run_dir: Path, rank: int) -> list[Path]:
    """Return the files of a rank's log, the oldest first."""
    older = 1
    while log_path(run_dir, rank, older).exists():
        older += 1
    found = [log_path(run_dir, rank, number) for number in range(older - 1, -1, -1)]
    return [path for path in found if path.exists()]


def lines_of(run_dir: Path, rank: int) -> Iterator[LogLine]:
    """Yield the lines of one rank's log, the oldest first. One that is not whole yet is passed over."""
    for path in files_of(run_dir, rank):
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield parsed(rank, line)


def merged(run_dir: Path, ranks: Sequence[int]) -> Iterator[LogLine]:
    """Yield the lines of several ranks by their moments."""
    return heapq.merge(*(lines_of(run_dir, rank) for rank in ranks), key=lambda line: line.time)


def parsed(rank: int, line: bytes) -> LogLine:
    """Return a line of a rank's log; one of another form as text alone."""
    text = line.decode(errors="replace").rstrip("\n")
    moment, _, rest = text.partition(" ")
    stream, _, said = rest.partition(" ")
    return LogLine(rank, moment, stream, said) if stream in (OUT, ERR) else LogLine(rank, "", OUT, text)


def first_failure(run_dir: Path) -> FirstFailure | None:
    """Return what failed first in the newest start of a run; None where that has not failed."""
    starts = starts_of(run_dir)
    if not starts:
        return None
    records = list(records_in(starts[-1][1], LAST_BYTES))
    ends = [read(RunEnded, line) for line in records if line["kind"] == RunEnded.KIND]
    if not ends or ends[-1].status != "failed":
        return None
    error = ends[-1].error or {}
    faults = [read(FaultRecord, line) for line in records if line["kind"] == FaultRecord.KIND]
    rank = error.get("rank", faults[-1].rank if faults else None)
    what, because = str(error.get("what", "")), str(error.get("because", ""))
    return FirstFailure(rank if isinstance(rank, int) else None, what, because, str(error.get("traceback", "")))


class LogFollower:
    """Gives what is added to the logs of some ranks since the last call, over files that are set aside meanwhile."""

    def __init__(self, run_dir: Path, ranks: Sequence[int] | None = None) -> None:
        """`ranks` are those that are followed; None for all there are, whenever their logs begin."""
        self._run_dir, self._ranks = run_dir, ranks
        self._at: dict[int, tuple[int, int]] = {}  # by rank: the file's number on its disk, and how far it is read

    def new(self) -> list[LogLine]:
        """Return the lines that are new, by their moments. The first call returns all."""
        ranks = ranks_with_logs(self._run_dir) if self._ranks is None else self._ranks
        return sorted((line for rank in ranks for line in self._of(rank)), key=lambda line: line.time)

    def _of(self, rank: int) -> list[LogLine]:
        files = files_of(self._run_dir, rank)
        known, offset = self._at.get(rank, (0, 0))
        numbers = [path.stat().st_ino for path in files]
        first = numbers.index(known) if known in numbers else 0
        found: list[LogLine] = []
        for number, path in list(zip(numbers, files, strict=True))[first:]:
            with path.open("rb") as file:
                file.seek(offset if number == known else 0)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            found += [parsed(rank, line) for line in whole.splitlines(keepends=True)]
            self._at[rank] = number, (offset if number == known else 0) + len(whole)
        return found
