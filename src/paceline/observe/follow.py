"""Follower: the new records of a run's journal since it was last asked, while the run goes on and after it.

Only whole lines are read: what a writer has begun is read when its end is there. Nothing that a journal may hold makes
reading fail: a line that was cut short is passed over, and a new start's file is found when it appears. So are files
beside the starts', of whoever watches the run (alerts) and of its other nodes; their records come after the starts'.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.spec.journal.kinds import parse
from paceline.spec.journal.reading import parsed_line, starts_of
from paceline.spec.journal.record import Record

CHUNK_BYTES = 1 << 20  # that are read at once, so that a long journal is never in memory whole

NODES = "nodes"  # the folder of what nodes other than the first write


@dataclass
class _Place:
    """How far one start's file was read: where in it, and which file it was."""

    offset: int = 0
    inode: int = 0
    is_closed: bool = False  # a later start is there, and the rest was read


class Follower:
    """The records of a run's journal, each given once and in the order of the file; older starts come first."""

    def __init__(self, run_dir: Path, after: int = 0, node_bytes: int | None = None) -> None:
        """`run_dir` need not be there yet. Starts up to the number `after` are passed over.

        With `node_bytes` only so much is read of what each other node had written before the first look: hundreds of
        nodes write more than anybody looks at.
        """
        self.run_dir, self._after, self._node_bytes = Path(run_dir), after, node_bytes
        self._places: dict[Path, _Place] = {}

    def new(self) -> list[Record]:
        """Return the records written since the last call; kinds that this version does not know are passed over.

        Raises OSError where the journal is there and nothing of it can be read; a later call goes on from there.
        """
        found: list[Record] = []
        try:
            for line in self.lines():
                if (record := parse(line)) is not None:
                    found.append(record)
        except OSError:
            if not found:
                raise
        return found

    def lines(self) -> Iterator[dict[str, object]]:
        """Yield the same as plain data, unknown kinds too, each with `attempt` set to its start's number.

        It is read to its end: who leaves off early misses what was read with the last line. Raises as `new`.
        """
        starts = [each for each in starts_of(self.run_dir) if each[0] > self._after]
        newest = starts[-1][0] if starts else max(1, self._after)
        ways = [(number, path, number == newest) for number, path in starts]
        ways += [(newest, path, True) for path in _beside(self.run_dir / "journal")]
        for number, path, is_last in ways:
            place = self._places.get(path) or self._first_place(path)
            for raw in self._raw_lines(path, place, is_last):
                line = parsed_line(raw)
                if line is not None:
                    line.setdefault("attempt", number)
                    yield line

    def _first_place(self, path: Path) -> _Place:
        place = self._places[path] = _Place()
        if self._node_bytes is not None and path.parent.name == NODES:
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                place.offset, place.inode = max(0, status.st_size - self._node_bytes), status.st_ino
        return place

    def _raw_lines(self, path: Path, place: _Place, is_last: bool) -> Iterator[bytes]:
        if place.is_closed and not is_last:
            return
        try:
            status = path.stat()
            if (status.st_ino, status.st_size) == (place.inode, place.offset) and is_last:
                return
            file = path.open("rb")
        except FileNotFoundError:  # it was there when the folder was listed
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != place.inode or status.st_size < place.offset:  # another file under the same name
                place.offset, place.inode = 0, status.st_ino
            file.seek(place.offset)
            rest = b""
            while place.offset + len(rest) < status.st_size:
                chunk = file.read(min(CHUNK_BYTES, status.st_size - place.offset - len(rest)))
                if not chunk:
                    break
                whole, newline, after = chunk.rpartition(b"\n")
                if not newline:
                    rest += chunk
                    continue
                place.offset += len(rest) + len(whole) + 1
                lines = (rest + whole).split(b"\n")
                rest = after
                yield from lines
            if not is_last:  # its writer is gone, and adds no end to the last line
                place.offset += len(rest)
                place.is_closed = True
                if rest:
                    yield rest


def _beside(folder: Path) -> list[Path]:
    """Return the files of records that are no start's: of whoever watches the run, and of its other nodes."""
    found = [*folder.glob("*.jsonl"), *folder.glob(f"{NODES}/*.jsonl")]
    return sorted(path for path in found if not (path.parent == folder and path.stem.isdigit()))
