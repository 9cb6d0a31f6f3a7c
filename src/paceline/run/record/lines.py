"""Records as lines of a file: one JSON object and one write each, below whatever was cut short before it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from paceline.spec.journal.record import Record, plain


def spelt(value: Any) -> Any:
    """Return the value with numbers that JSON lacks (NaN, infinities) spelt as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): spelt(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spelt(item) for item in value]
    return value


def record_line(record: Record) -> bytes:
    """Return a record as its line of a journal."""
    fields = plain(record)
    line = (json.dumps(fields, separators=(",", ":"), default=str, allow_nan=True) + "\n").encode()
    if b"NaN" in line or b"Infinity" in line:
        line = (json.dumps(spelt(fields), separators=(",", ":"), default=str) + "\n").encode()
    return line


def append_line(path: Path, line: bytes, mode: int = 0o600) -> None:
    """Append a line, of which this process is the one writer, in one write. Raises OSError.

    Where the last line was cut short by the end of an earlier writer, the new one begins below it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(file, line) :]
    finally:
        os.close(file)
