"""What the starts of a run have on record already, so that who takes the records over tells it no second time.

A world whose first rank is new begins a start of its own, under a brief that an earlier one may have told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from paceline.spec.journal.kinds import DecisionRecord, StepRecord, VerifyRecord
from paceline.spec.journal.line import line_of
from paceline.spec.journal.reading import TAIL_BYTES, parsed_line, starts_of
from paceline.spec.journal.record import Record

KINDS = tuple(f'"kind":"{kind.KIND}"'.encode() for kind in (DecisionRecord, VerifyRecord))
STEP = f'"kind":"{StepRecord.KIND}"'.encode()
OF_ITS_MOMENT = ("time", "attempt", "schema")


def told_before(run_dir: Path) -> set[str]:
    """Return the decisions and proofs that stand in the journal.

    Those are all of its newest start and the one before, in which worlds that were formed anew may stand anywhere, and
    of each other what stands before its first step and in its end. Files that cannot be read have told nothing.
    """
    found, starts = set[str](), starts_of(run_dir)
    newest = [path for _, path in starts[-2:]]  # a new first rank has opened its own by now
    for _, path in starts:
        try:
            lines = _lines(path, whole=path in newest)
            found |= {_key(line) for line in lines if any(kind in line for kind in KINDS)}
        except OSError:
            continue
    return found


def is_told(record: Record, told: set[str]) -> bool:
    """Return whether a record stands among those, whenever it was made."""
    return _key(line_of(record)) in told


def _lines(path: Path, whole: bool) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            yield line
            if STEP in line and not whole:
                break
        file.seek(max(file.tell(), path.stat().st_size - TAIL_BYTES))
        yield from file


def _key(line: bytes) -> str:
    record = parsed_line(line) or {}
    return json.dumps({name: value for name, value in record.items() if name not in OF_ITS_MOMENT}, sort_keys=True)
