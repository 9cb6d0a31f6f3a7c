"""JournalCursor: how far one tool has got in a run's journal, kept in a file of its own.

A batch counts as delivered when the tool has taken it and the file says so: a process that dies between the two
delivers that batch once more, and nothing is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.spec.journal.kinds import parse
from paceline.spec.journal.reading import parsed_line, starts_of
from paceline.spec.journal.record import Record

FOLDER = "exports"
MOST_BYTES = 256 << 10  # of journal in one batch


@dataclass(frozen=True)
class JournalPlace:
    """A place between two lines: the number of a start, and bytes of its file that were read."""

    attempt: int = 0
    offset: int = 0


class JournalCursor:
    """Reads a journal from where a tool has got to. `state` is what the tool has to know when it goes on."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """A file that cannot be read begins anew: then the whole journal is delivered once more."""
        self._run_dir, self.path = run_dir, run_dir / FOLDER / f"{name}.json"
        self.place, self.state = JournalPlace(), dict[str, object]()
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            told = json.loads(self.path.read_text())
            self.place = JournalPlace(int(told["attempt"]), int(told["offset"]))
            self.state = dict(told["state"])

    def read(self) -> tuple[list[Record], JournalPlace]:
        """Return the next whole records, and the place after them; none where there is nothing new."""
        starts = [each for each in starts_of(self._run_dir) if each[0] >= self.place.attempt]
        for at, (attempt, path) in enumerate(starts):
            offset = self.place.offset if attempt == self.place.attempt else 0
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(MOST_BYTES)
                while data and b"\n" not in data and (more := file.read(MOST_BYTES)):  # one very long line
                    data += more
            whole = data[: data.rfind(b"\n") + 1]
            if whole:
                lines = [line for each in whole.split(b"\n") if (line := parsed_line(each))]
                records = [record for line in lines if (record := parse({"attempt": attempt, **line}))]
                return records, JournalPlace(attempt, offset + len(whole))
            if at == len(starts) - 1:
                return [], JournalPlace(attempt, offset)
        return [], self.place

    def commit(self, place: JournalPlace, state: dict[str, object]) -> None:
        """Keep that all before a place was delivered. Raises OSError."""
        self.place, self.state = place, state
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part")
        told = {"attempt": place.attempt, "offset": place.offset, "state": state}
        with part.open("w") as file:
            json.dump(told, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)
