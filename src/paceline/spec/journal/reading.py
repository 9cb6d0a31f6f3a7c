"""Reading journals: the starts of a run, and their records. Everything that shows a run reads its journal.

A last line that was cut short is passed over, and so is what others left in the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import StorageError
from paceline.spec.journal.kinds import parse
from paceline.spec.journal.record import Record, Some
from paceline.spec.journal.watching import NodeSample
from paceline.spec.run_files import journal_folder

TAIL_BYTES = 1 << 20  # of a journal that are read first, from its end
BLOCK_BYTES = 1 << 17  # of a journal that are looked through at a time for what is rare in it

_NAME = re.compile(r"([0-9]{4,})\.jsonl")
_OF_NODE = re.compile(r"node-([0-9]{4,})-[\w.-]+\.jsonl")


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return (number, path) of whatever has the name of a start, by number: other names are not the journal's."""
    named = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), path) for match, path in named if match)


def starts_of(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (number, file) of every start of a run, oldest first. What others left in the folder is passed over."""
    return [(number, path) for number, path in numbered(journal_folder(run_dir)) if path.is_file()]


@contextmanager
def reading_of(run_dir: Path) -> Iterator[None]:
    """Tell of a journal that the block cannot read, which it needs to go on, as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"the journal of {run_dir} cannot be read", str(error), "check run.dir") from error


def starts_on(run_dir: Path, fingerprint: str | None) -> list[tuple[int, Path]]:
    """Return (number, file) of every start on the data of a fingerprint, oldest first; of None, of every start.

    A start that does not say which data it had is among them.
    """
    if fingerprint is None:
        return starts_of(run_dir)
    found = []
    for number, path in starts_of(run_dir):
        started = next(records_of_kind(path, "run_started"), {})
        if (started.get("facts") or {}).get("fingerprint", fingerprint) == fingerprint:
            found.append((number, path))
    return found


def node_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (number of the start, file) of every node that is not the first, which has samples of its own."""
    folder = journal_folder(run_dir)
    named = [(_OF_NODE.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), path) for match, path in named if match and path.is_file())


def read_nodes(run_dir: Path) -> Iterator[NodeSample]:
    """Yield the samples of all nodes: the first one's of each start, then those of the others."""
    yield from read_kind(run_dir, NodeSample)
    for number, path in node_files(run_dir):
        for line in records_of_kind(path, NodeSample.KIND):
            record = parse({"attempt": number, **line})
            if isinstance(record, NodeSample):
                yield record


def read_journal(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield every record of a run, oldest start first, each with `attempt` set to its start's number."""
    for number, path in starts_of(run_dir):
        for record in records_in(path):
            record.setdefault("attempt", number)
            yield record


def records_in(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield every record of one start's file, or those within its last bytes."""
    with path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, path.stat().st_size - last_bytes))
        yield from filter(None, map(parsed_line, file))  # line by line: a long journal is never in memory whole


def parsed_line(line: bytes) -> dict[str, object] | None:
    """Return a line's record; None for an empty line, or the last one of a process that was killed while writing."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def records_of_kind(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a kind, or a few, in a start's file in order; no other line of it is parsed."""
    for line in _lines_with([f'"{kind}"'.encode() for kind in kinds], path):
        if (record := parsed_line(line)) and record["kind"] in kinds:
            yield record


def _lines_with(words: list[bytes], path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that hold one of the words. What holds none is passed over by many lines at a time."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            lines, end, begun = block.rpartition(b"\n")
            if not end:
                rest += begun
                continue
            lines, rest = rest + lines, begun
            if any(word in lines for word in words):
                yield from (line for line in lines.split(b"\n") if any(word in line for word in words))
    if any(word in rest for word in words):
        yield rest


def last_record(path: Path, kind: type[Some], last_bytes: int) -> Some | None:
    """Return the last record of a kind within the last bytes of a start's file; None where it is not there.

    Lines are parsed from the end until it is found: where the kind is frequent, a few.
    """
    word = f'"{kind.KIND}"'.encode()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - last_bytes))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        found = parsed_line(line) if word in line else None
        record = parse(found) if found is not None and found["kind"] == kind.KIND else None
        if isinstance(record, kind):
            return record
    return None


def read_kind(run_dir: Path, kind: type[Some]) -> Iterator[Some]:
    """Yield a run's records of one kind, oldest start first; no other line of its journal is parsed."""
    for number, path in starts_of(run_dir):
        for line in records_of_kind(path, kind.KIND):
            record = parse({"attempt": number, **line})
            if isinstance(record, kind):
                yield record


def records_back_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the last records of one start's file, from a step on that is not after `step`, or else all.

    A long run's journal is read from its end.
    """
    size, last_bytes = path.stat().st_size, TAIL_BYTES
    while True:
        records = list(records_in(path, last_bytes))
        steps = [record.get("step") or 0 for record in records if record["kind"] == "step"]
        if last_bytes >= size or (steps and min(steps) <= step):
            return records
        last_bytes *= 4


def read_tail_step(run_dir: Path) -> int:
    """Return the last step on record, 0 where there is none: of a long journal the end is read."""
    for _, path in reversed(starts_of(run_dir)):
        steps = [record.get("step") for record in records_in(path, TAIL_BYTES) if record["kind"] == "step"]
        if steps and isinstance(steps[-1], int):
            return steps[-1]
    return 0


def read_records(run_dir: Path) -> Iterator[Record]:
    """Yield every record of a run as what it is declared to be, oldest start first; unknown kinds are passed over."""
    for line in read_journal(run_dir):
        record = parse(line)
        if record is not None:
            yield record


def final_steps(records: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Return the step records that count, in order: of a step run twice after a restart, the last one."""
    by_step = {record["step"]: record for record in records if record["kind"] == "step"}
    return [by_step[step] for step in sorted(by_step)]
