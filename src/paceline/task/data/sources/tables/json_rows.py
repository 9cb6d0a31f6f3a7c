"""Rows of JSON files: one array of objects, or an object on each line, whichever the file begins as.

An array is read piece by piece: it may be larger than memory.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from paceline.errors import DamagedData, DataError
from paceline.task.data.sources.documents import Damaged
from paceline.task.data.sources.listing import File
from paceline.task.data.sources.reading.unpacked import opened

PIECE_CHARACTERS = 1 << 20  # read at a time
_BETWEEN = re.compile(r"[\s,]*")
_FORM = "an array of objects, or one object on each line; text: before the path reads it as a text"
NumberedRow = tuple[str, dict[str, Any]]


def first_object(stream: IO[bytes], file: File) -> dict[str, object]:
    """Return the first object of a file, an empty one for none. Raises DataError for a file that is no table."""
    first = next(_objects(stream, file, Damaged(skip=True)), None)
    return first[1] if first is not None else {}


def read_json(file: File, damaged: Damaged) -> Iterator[NumberedRow]:
    """Yield the objects of a file. An entry that is none goes to `damaged`."""
    with opened(file) as stream:
        yield from _objects(stream, file, damaged)


def _objects(stream: IO[bytes], file: File, damaged: Damaged) -> Iterator[NumberedRow]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    pieces = _JsonText(text, file)
    if not pieces.begins_with("["):
        if not pieces.begins_with("{"):
            raise DataError(f"{file.path} is no table", "it begins with neither [ nor {", _FORM)
        yield from _lone_objects(pieces, file, damaged)
        return
    pieces.skip(1)
    number = 0
    while not pieces.begins_with("]"):
        number += 1
        found = pieces.next(f"entry {number:,}")
        if isinstance(found, dict):
            yield f"{file.name}, entry {number:,}", found
        else:
            damaged.found(_no_object(file, f"entry {number:,}", found))


def _lone_objects(pieces: _JsonText, file: File, damaged: Damaged) -> Iterator[NumberedRow]:
    """Yield objects one after the other; a file that is a single one is no table."""
    number, first = 0, None
    while not pieces.is_done():
        number += 1
        found = pieces.next(f"object {number:,}")
        if number == 1:
            first = found
            if pieces.is_done():
                raise _single(file, found)
        if isinstance(found, dict):
            yield f"{file.name}, object {number:,}", found
        else:
            damaged.found(_no_object(file, f"object {number:,}", found))
    assert first is not None, "the file begins with an object"


def _single(file: File, found: Any) -> DataError:
    """Return the error of a file that is one object, with the field that seems to hold the rows."""
    lists = [name for name, value in found.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists:
        name = lists[0]
        move = f"jq -c '.\"{name}\"[]' {file.name} > rows.jsonl"
        return DataError(f"{file.path} is one object", f"its rows seem to be in its field '{name}'",
                         f"take them out of it: {move}")  # fmt: skip
    if found and all(isinstance(value, list | dict) for value in found.values()):
        return DataError(f"{file.path} is one object of columns", f"they are {', '.join(list(found)[:5])}",
                         'an object for each row: pandas writes them by to_json(path, orient="records")')  # fmt: skip
    told = ", ".join(list(found)[:5])
    return DataError(
        f"{file.path} is one object, and no table", f"its fields are {told}" if told else "it is empty", _FORM
    )


def _no_object(file: File, place: str, found: object) -> DamagedData:
    return DamagedData(f"{file.path}, {place} is not an object", f"it is {json.dumps(found)[:40]}", _FORM)


class _JsonText:
    """The text of a JSON file, of which one value after the other is read."""

    def __init__(self, text: io.TextIOWrapper, file: File) -> None:
        self._text, self._file = text, file
        self._held, self._at, self._ended = "", 0, False
        self._decoder = json.JSONDecoder()
        self._more()

    def begins_with(self, character: str) -> bool:
        """Return whether the next character that is no space and no comma is this one; False at the end."""
        return not self.is_done() and self._held[self._at] == character

    def is_done(self) -> bool:
        """Return whether nothing but spaces and commas is left."""
        while True:
            self._at = _BETWEEN.match(self._held, self._at).end()  # type: ignore[union-attr]  # it matches anything
            if self._at < len(self._held):
                return False
            if self._ended:
                return True
            self._more()

    def skip(self, characters: int) -> None:
        """Leave out characters."""
        self._at += characters

    def next(self, place: str) -> Any:
        """Return the next value. Raises DamagedData for one that is no JSON, or that the file breaks off in."""
        if self.is_done():
            raise DamagedData(f"{self._file.path} breaks off before {place}", "its array is not closed", _AGAIN)
        while True:
            try:
                found, self._at = self._decoder.raw_decode(self._held, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise DamagedData(f"{self._file.path}, {place} is not JSON", error.msg, _AGAIN) from error
                self._more()
            except ValueError as error:  # a number of thousands of digits
                raise DamagedData(f"{self._file.path}, {place} cannot be read", str(error).split(";")[0],
                                  "write such numbers as texts") from error  # fmt: skip
            except RecursionError as error:
                raise DamagedData(f"{self._file.path}, {place} cannot be read", "its JSON is nested too deeply",
                                  "flatten the record") from error  # fmt: skip
            else:
                return found

    def _more(self) -> None:
        """Read on: as much as is held already, so that a long value is not decoded again and again."""
        left = self._held[self._at :]
        try:
            more = self._text.read(max(PIECE_CHARACTERS, len(left)))
        except UnicodeDecodeError as error:
            raise DamagedData(f"{self._file.path} is not UTF-8 text", str(error), _AGAIN) from error
        self._held, self._at, self._ended = left + more, 0, not more


_AGAIN = "write or download it again, in UTF-8"
