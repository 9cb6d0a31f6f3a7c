"""A record as the line of a journal that it is written as."""

from __future__ import annotations

import json
import math

from paceline.spec.journal.record import Record, plain


def line_of(record: Record) -> bytes:
    """Return a record as one line of JSON, its end included; numbers that JSON lacks (NaN) are spelt as strings."""
    fields = plain(record)
    line = (json.dumps(fields, separators=(",", ":"), default=str, allow_nan=True) + "\n").encode()
    if b"NaN" in line or b"Infinity" in line:
        line = (json.dumps(spelt(fields), separators=(",", ":"), default=str) + "\n").encode()
    return line


def spelt(value: object) -> object:
    """Return the value with numbers that JSON lacks (NaN, infinities) spelt as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): spelt(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spelt(item) for item in value]
    return value
