"""Files of records beside the journals of a run's starts: whoever watches the run writes a file, and nobody else does.

`RUN/journal/alerts-0001.jsonl` is one: its name is no start's, so readers of training pass it over. Lines are those of
any journal. Torch-free.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from paceline.spec.journal.kinds import parse
from paceline.spec.journal.line import line_of
from paceline.spec.journal.reading import records_in
from paceline.spec.journal.record import Record, Some
from paceline.spec.run_files import journal_folder

MOST_WAITING = 1000  # records that are held for a disk that takes none
_NAME = re.compile(r"([a-z]+)-([0-9]{4,})\.jsonl")


class BesideFile:
    """A file beside the starts' that one writer appends to, "NAME-0001.jsonl" and so on."""

    def __init__(self, run_dir: Path, name: str, group_read: bool = False) -> None:
        """The file is made with its first record, and is the user's alone, or its group's to read."""
        self._folder, self._name, self._mode = journal_folder(run_dir), name, 0o640 if group_read else 0o600
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._file, self._is_cut = -1, False  # whether a full disk took a part of the last line

    def write(self, record: Record) -> None:
        """Append a record. Where the disk takes none it waits for the next one."""
        self._waiting.append(line_of(record))
        try:
            if self._file < 0:
                self._file = self._opened()
            while self._waiting:
                line = b"\n" * self._is_cut + self._waiting[0]  # below the part, whichever record it is of
                self._is_cut = os.write(self._file, line) < len(line)
                if self._is_cut:
                    return
                self._waiting.popleft()
        except OSError:  # a full disk is told by the journal's own writer, and by the rule of the disk
            return

    def close(self) -> None:
        """Close the file where it was made."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _opened(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(match[2]) for path in self._folder.iterdir()
                   if (match := _NAME.fullmatch(path.name)) and match[1] == self._name]  # fmt: skip
        path = self._folder / f"{self._name}-{1 + max(numbers, default=0):04d}.jsonl"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._mode != 0o600:
            os.fchmod(file, self._mode)
        return file


def beside_files(run_dir: Path, name: str = "") -> list[Path]:
    """Return the files beside the starts', of one name or of all, oldest first."""
    folder = journal_folder(run_dir)
    found = [(match[1], int(match[2]), path) for path in (folder.iterdir() if folder.is_dir() else ())
             if (match := _NAME.fullmatch(path.name)) and name in ("", match[1])]  # fmt: skip
    return [path for _, _, path in sorted(found)]


def read_beside(run_dir: Path, kind: type[Some], name: str = "") -> Iterator[Some]:
    """Yield the records of a kind in the files beside the starts'."""
    for path in beside_files(run_dir, name):
        for line in records_in(path):
            record = parse(line)
            if isinstance(record, kind):
                yield record
