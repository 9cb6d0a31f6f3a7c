"""Rows of CSV and TSV files: read by the standard library's parser, never by splitting lines, since a quoted field may
hold line ends."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import sys
from collections.abc import Iterator
from typing import IO, cast

from paceline.errors import DamagedData, DataError
from paceline.task.data.sources.documents import Damaged
from paceline.task.data.sources.listing import File
from paceline.task.data.sources.reading.unpacked import opened
from paceline.task.data.sources.tables.columns import LABEL_NAMES, MORE_LABEL_NAMES, NAMELESS, TEXT_NAMES

DELIMITERS = (",", ";", "|", "\t")
COMMENT = "#"
EXCEL_LINE = "sep="  # a first line of Excel's that names the delimiter
USUAL = frozenset((*TEXT_NAMES, *LABEL_NAMES, *MORE_LABEL_NAMES, "prompt", "completion"))  # names of columns
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONVERT = "write it as UTF-8, such as by: iconv -f LATIN1 -t UTF-8 FILE > NEW"


def csv_columns(stream: IO[bytes], file: File, kind: str) -> tuple[str, ...]:
    """Return the names of the columns. Raises DataError for a header that does not name columns."""
    return tuple(_header(_lines(stream), file, kind)[0])


def read_csv(file: File, kind: str, damaged: Damaged) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows below the header; all values are text."""
    csv.field_size_limit(sys.maxsize)  # of the parser, for all of Python: a text may be longer than 131,072 characters
    with opened(file) as stream:
        names, rows = _header(_lines(stream), file, kind)
        for number in itertools.count(1):
            try:
                values = next(rows, None)
            except csv.Error as error:
                raise DamagedData(
                    f"{file.path}, row {number:,} cannot be read", str(error),
                    "quote fields with line ends or quotes in them, double the quotes inside, and write UTF-8",
                ) from error  # fmt: skip
            except UnicodeDecodeError as error:
                raise DamagedData(f"{file.path}, row {number:,} cannot be read", str(error), _CONVERT) from error
            if values is None:
                return
            if not values or (len(names) > 1 and not any(map(str.strip, values))):
                continue  # a blank line, or one of delimiters alone, as spreadsheets leave them
            if len(values) != len(names):
                is_comment = values[0].startswith(COMMENT)
                damaged.found(DamagedData(
                    f"{file.path}, row {number:,} has {len(values)} fields", f"the header names {len(names)}",
                    "comments are passed over above the header alone: take this line out" if is_comment
                    else "quote fields that hold the delimiter or line ends",
                ))  # fmt: skip
                continue
            yield f"{file.name}, row {number:,}", dict(zip(names, values, strict=True))


def _lines(stream: IO[bytes]) -> io.TextIOWrapper:
    """Return the text of a file in UTF-8, or in UTF-16 with a mark that says so."""
    raw = cast(io.RawIOBase, stream)  # a file, or what unpacks one
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(raw)
    encoding = "utf-16" if buffered.peek(2)[:2] in UTF_16 else "utf-8-sig"
    return io.TextIOWrapper(buffered, encoding=encoding, newline="")


def _header(lines: io.TextIOWrapper, file: File, kind: str) -> tuple[list[str], Iterator[list[str]]]:
    """Return the names of the columns and the rows below. Raises DataError for a header that does not name columns."""
    try:
        delimiter, first, ahead = _first_line(lines, kind)
        while first.count('"') % 2 and not ahead and (more := lines.readline()):  # a quoted name with a line end
            first += more
        names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter, strict=True), [])]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DamagedData(f"the header of {file.path} cannot be read", str(error), _CONVERT) from error
    twice = sorted({name for name in names if names.count(name) > 1 and name})
    if twice:
        raise DataError(
            f"{file.path} has two columns '{twice[0]}'", "a column is known by its name", "rename one of them"
        )
    if not any(names):
        raise DataError(f"{file.path} has no header", "it holds no line with text",
                        "name the columns in the first line")  # fmt: skip
    named = [name or NAMELESS.format(number) for number, name in enumerate(names, 1)]
    return named, csv.reader(itertools.chain(ahead, lines), delimiter=delimiter, strict=True)


def _first_line(lines: io.TextIOWrapper, kind: str) -> tuple[str, str, list[str]]:
    """Return the delimiter, the line of the columns' names, and a line of rows that was read to tell.

    Blank lines, Excel's own, and comments above are passed over. A line that begins with # is no comment where it
    splits into as many fields as the line below and that one names no columns: some programs mark the header so.
    """
    first, marked = _next_line(lines), ""
    if first.lower().startswith(EXCEL_LINE) and len(told := first[len(EXCEL_LINE) :].strip("\r\n")) == 1:
        return told, lines.readline(), []
    while first.startswith(COMMENT) and (below := _next_line(lines)):
        first, marked = below, first
    tabs = kind == "tsv" and "\t" in first
    delimiter = "\t" if tabs else max(DELIMITERS, key=lambda each: (first.count(each), each == ","))
    names = {name.strip().lower() for name in first.split(delimiter)}
    if first.count(delimiter) and marked.count(delimiter) == first.count(delimiter) and not names & USUAL:
        return delimiter, marked.removeprefix(f"{COMMENT} "), [first]
    return delimiter, first, []


def _next_line(lines: io.TextIOWrapper) -> str:
    line = lines.readline()
    while line and not line.strip():
        line = lines.readline()
    return line
