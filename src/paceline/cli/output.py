"""What the verbs write: lines for people, one JSON object for machines. Colour only on a terminal without NO_COLOR."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from paceline.cli.json.shapes import FORMAT
from paceline.said import each_folded, folded
from paceline.units import Amount

Say = Callable[[str], None]
CheckShape = Callable[[str, set[str]], None]
CHECKS: list[CheckShape] = []  # what is told the shape and the keys of every object; a test's, and none of a user's
_CODES = {"bold": "1", "dim": "2", "red": "31"}


def say_to(json_wanted: bool) -> Say:
    """Return the function that tells a person what goes on: on stdout, or on stderr where stdout is for JSON."""

    def say(line: str) -> None:
        stream = sys.stderr if json_wanted else sys.stdout
        print(folded(line, stream), file=stream, flush=True)

    return say


def say_folded(line: str, hanging: int | None = None) -> None:
    """Print a line for people on stdout, folded to its terminal; below its first line `hanging` columns are free."""
    print(folded(line, sys.stdout, hanging))


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what this process and its children write to stdout to stderr, so that stdout holds nothing but JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_json(value: object, shape: str, exit_code: int | None = None) -> None:
    """Write the value as one JSON object of a declared shape on stdout, with `format` and the command's `exit_code`.

    The exit code is the one that is given, else the value's own, else 0.
    """
    plain = json_safe(value)
    code = plain.pop("exit_code", getattr(value, "exit_code", 0))
    for check in CHECKS:
        check(shape, set(plain))
    print_bare({"format": FORMAT, "exit_code": code if exit_code is None else exit_code, **plain})


def print_bare(value: object) -> None:
    """Write a document of another format, such as a JSON schema, on stdout."""
    print(json.dumps(json_safe(value), indent=2, allow_nan=False))


def json_safe(value: object) -> Any:
    """Return dataclasses, amounts and paths as plain data. A number that is not finite is unknown: null."""
    if isinstance(value, Amount):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_safe(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, Path) else repr(value)


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return the text in a style ("bold", "dim", "red") where the stream is a terminal that wants colour."""
    wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if wanted else text


def print_error(message: str, word: str = "error") -> None:
    """Write how a command ended on stderr, for people."""
    told = each_folded(f"{word}: {message}", sys.stderr).removeprefix(f"{word}:")
    print(f"{paint(word + ':', 'red', sys.stderr)}{told}", file=sys.stderr, flush=True)


def table_lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines of aligned columns, two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
