"""JSON that is read and not trusted: whatever is missing, altered or of another type is refused with its reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import StorageError

MAX_JSON_BYTES = 2**30


class Refused(ValueError):
    """A file of a checkpoint says something that cannot be."""


@contextmanager
def refusal(path: Path, name: str) -> Iterator[None]:
    """Turn whatever reading and checking the file raises into a StorageError about the checkpoint `path`."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        because = f"{name} is missing, so the save was never completed" if missing else f"{name}: {error}"
        raise StorageError(f"{path} is not a complete checkpoint", because, "use an earlier checkpoint") from error


def content(file: Path) -> bytes:
    """Return the bytes of a file. Raises Refused where there are more than JSON may have, OSError."""
    if file.stat().st_size > MAX_JSON_BYTES:
        raise Refused(f"it is larger than {MAX_JSON_BYTES} bytes")
    return file.read_bytes()


def digest(body: object) -> str:
    """Return the digest of a value in canonical form: keys sorted, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def table(document: object) -> dict[str, Any]:
    """Return the document if it is a table. Raises Refused."""
    if not isinstance(document, dict):
        raise Refused(f"it is a {type(document).__name__}, not a table")
    return document


def typed(holder: object, key: str, kind: type) -> Any:
    """Return `holder[key]` if it is of that type. Raises Refused."""
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        raise Refused(f"'{key}' is not a {kind.__name__}")
    return value


def count(holder: object, key: str) -> int:
    """Return `holder[key]` if it is a whole number from 0 to 2^63 - 1. Raises Refused."""
    return numbers([typed(holder, key, int)], key)[0]


def numbers(values: list[Any], what: str) -> tuple[int, ...]:
    """Return the list as a tuple of whole numbers from 0 to 2^63 - 1. Raises Refused."""
    for value in values:
        if type(value) is not int or not 0 <= value < 2**63:  # a bool is none
            raise Refused(f"{what}: {value!r} is not a count")
    return tuple(values)
