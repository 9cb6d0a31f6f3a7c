"""Reading the logs of a run's ranks: files that were set aside first, the newest last. Torch-free."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paceline.spec.journal.kinds import FaultRecord, RunEnded
from paceline.spec.journal.reading import records_in, starts_of
from paceline.spec.journal.record import read
from paceline.supervise.logs.files import ERR, FOLDER, OUT, log_path

_NAME = re.compile(r"rank-([0-9]+)\.log(?:\.([0-9]+))?")
HEAD_BYTES, PIECE_BYTES = 64, 1 << 20  # of a file that tell it from others; that are read at once
TRIES = 20  # to look at all files while none is set aside
MOST_MISSING = 3  # numbers in a row that are free, after which there are no older files
LogKey = tuple[int, bytes]
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


def lines_of(run_dir: Path, rank: int) -> Iterator[LogLine]:
    """Yield the lines of one rank's log, the oldest first. One that is not whole yet is passed over.

    The files are those that there are at the beginning, also where they are set aside meanwhile. None is held open
    between two lines: there may be more ranks than a process may open files.
    """
    for known in _kept(run_dir, rank):
        offset, rest = 0, b""
        while data := _piece(run_dir, rank, known, offset):
            offset += len(data)
            *whole, rest = (rest + data).split(b"\n")
            yield from (parsed(rank, line) for line in whole)


def _kept(run_dir: Path, rank: int) -> list[LogKey]:
    """Return what tells the files of a rank's log from each other, whatever they are called; the oldest first."""
    return list(dict.fromkeys(key for key, _ in _files(run_dir, rank)))[::-1]


def _files(run_dir: Path, rank: int) -> Iterator[tuple[LogKey, BinaryIO]]:
    """Yield the files of a rank's log, open, the newest first.

    They may be set aside meanwhile, under the next number. So from the newest on none is missed, one may come twice,
    and a number may be free at a moment.
    """
    older = missing = 0
    while missing < MOST_MISSING:
        path = log_path(run_dir, rank, older)
        older, missing = older + 1, missing + 1
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as file:
            yield _key(file), file
            missing = 0


def _key(file: BinaryIO) -> LogKey:
    """Return what tells a file from others: its number on the disk, and its first line once that is whole.

    The number is another file's as soon as a file is gone; its first line is not. It is b"" where no line is whole.
    """
    head = file.readline(HEAD_BYTES)
    return os.fstat(file.fileno()).st_ino, head if head.endswith(b"\n") or len(head) == HEAD_BYTES else b""


def _piece(run_dir: Path, rank: int, known: LogKey, offset: int) -> bytes:
    """Return what a file holds from an offset on, as much as is read at once; nothing where there is no more."""
    for key, file in _files(run_dir, rank):
        if key == known:
            file.seek(offset)
            return file.read(PIECE_BYTES)
    return b""


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
        self._at: dict[int, tuple[LogKey, int]] = {}  # by rank: the file, and how far it is read

    def new(self) -> list[LogLine]:
        """Return the lines that are new, by their moments. The first call returns all."""
        ranks = ranks_with_logs(self._run_dir) if self._ranks is None else self._ranks
        return sorted((line for rank in ranks for line in self._of(rank)), key=lambda line: line.time)

    def _of(self, rank: int) -> list[LogLine]:
        known, offset = self._at.get(rank, ((0, b""), 0))
        pieces: dict[LogKey, bytes] = {}
        for _ in range(TRIES):
            before = _number_on_disk(log_path(self._run_dir, rank))
            pieces = self._pieces(rank, known, offset)
            if _number_on_disk(log_path(self._run_dir, rank)) == before:
                break
        found: list[LogLine] = []
        for key, piece in list(pieces.items())[::-1]:
            found += [parsed(rank, line) for line in piece.split(b"\n")[:-1]]
            self._at[rank] = key, (offset if key == known else 0) + len(piece)
        return found

    def _pieces(self, rank: int, known: LogKey, offset: int) -> dict[LogKey, bytes]:
        """Return the whole lines of each file that are new, the newest file first.

        Their order is right where no file was set aside meanwhile.
        """
        pieces: dict[LogKey, bytes] = {}
        for key, file in _files(self._run_dir, rank):
            if key[1]:  # one without a whole line is looked at again
                file.seek(offset if key == known else 0)
                content = file.read()
                pieces[key] = content[: content.rfind(b"\n") + 1]
            if key == known:
                break
        return pieces


def _number_on_disk(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
