"""Rows of tables: CSV, TSV, JSON, JSONL, Parquet and Arrow files as one stream of records with named columns.

Every defect is a DamagedData that names the file and the row; it ends the reading, or is counted where damaged rows are
left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from paceline.errors import DamagedData, DataError, MissingExtra
from paceline.task.data.sources.documents import Damaged, parse_record
from paceline.task.data.sources.files import kind_of
from paceline.task.data.sources.listing import CorpusFiles, File, split_of
from paceline.task.data.sources.reading.arrow import arrow_rows, check_names, parquet_rows, plain_rows
from paceline.task.data.sources.reading.nested import type_of, with_asked
from paceline.task.data.sources.reading.unpacked import opened
from paceline.task.data.sources.tables.csv_rows import csv_columns, read_csv
from paceline.task.data.sources.tables.json_rows import first_object, read_json


class TableRecord(NamedTuple):
    """One row: its origin in words, its values by column, and the split that the name of its file says, if any.

    `filled` says that fields a row does not have stand in it as nothing.
    """

    origin: str
    values: dict[str, Any]
    split: str = ""
    filled: bool = False


def columns_of(listing: CorpusFiles, asked: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the columns of a table's first file. Raises DataError for a file without any.

    Of JSONL they are those of the first record. Names that are `asked` for by dots, "meta.text", follow where there are
    such fields.
    """
    file = listing.files[0]
    kind = kind_of(file.name)
    with opened(file) as stream:
        if kind in ("csv", "tsv"):
            return csv_columns(stream, file, kind)
        if kind == "json":
            return tuple(with_asked(first_object(stream, file), asked))
        if kind == "jsonl":
            for line in stream:
                if line.strip():
                    record = parse_record(line.removeprefix(b"\xef\xbb\xbf"), f"{file.path}, line 1")
                    return tuple(with_asked(record, asked)) if isinstance(record, dict) else ()
            return ()
        schema = _arrow_table(stream, file, kind)[0]
        return tuple(_names(schema, asked))


def read_records(listing: CorpusFiles, damaged: Damaged, asked: Sequence[str] = ()) -> Iterator[TableRecord]:
    """Yield the rows of all files of a table, in order, with the fields that are `asked` for by dots.

    Raises DataError for a file that cannot be read.
    """
    for file in listing.files:
        split, filled = split_of(file.name), kind_of(file.name) in ("parquet", "arrow")
        try:
            for origin, values in _rows_of(file, damaged, asked):
                yield TableRecord(origin, with_asked(values, asked), split, filled)
        except DamagedData as error:
            damaged.found(error)


def _rows_of(file: File, damaged: Damaged, asked: Sequence[str]) -> Iterator[tuple[str, dict[str, object]]]:
    kind = kind_of(file.name)
    if kind in ("csv", "tsv"):
        return read_csv(file, kind, damaged)
    if kind == "json":
        return read_json(file, damaged)
    if kind == "jsonl":
        return _read_jsonl(file, damaged)
    if kind in ("parquet", "arrow"):
        return _read_arrow(file, kind, asked)
    raise DataError(
        f"{file.path} is no table", "tables are CSV, TSV, JSON, JSONL, Parquet and Arrow files",
        "name a table, or read it as text: source = \"text:PATH\"",
    )  # fmt: skip


def _read_jsonl(file: File, damaged: Damaged) -> Iterator[tuple[str, dict[str, object]]]:
    with opened(file) as stream:
        for number, line in enumerate(stream, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            where = f"{file.path}, line {number:,}"
            try:
                values = parse_record(text, where)
                if not isinstance(values, dict):
                    raise DamagedData(f"{where} is not an object", f"it is {json.dumps(values)[:40]}",
                                      "one JSON object on each line")  # fmt: skip
            except DamagedData as error:
                damaged.found(error)
            else:
                yield f"{file.name}, line {number:,}", values


def _read_arrow(file: File, kind: str, asked: Sequence[str]) -> Iterator[tuple[str, dict[str, object]]]:
    with opened(file) as stream:
        _, batches = _arrow_table(stream, file, kind)
        number = 0
        try:
            for batch in batches:
                for values in plain_rows(batch, _names(batch.schema, asked)):
                    number += 1
                    yield f"{file.name}, row {number:,}", values
        except OSError as error:
            if error.errno is not None:
                raise  # of the system, which reads the file; those of damaged pages have no number
            raise _unreadable(file, kind, error) from error


def _names(schema: Any, asked: Sequence[str]) -> list[str]:
    """Return the names of a schema's columns, and those of fields of columns that are asked for."""
    own = list(schema.names)
    return own + [name for name in asked if name not in own and type_of(schema, name) is not None]


def _arrow_table(stream: IO[bytes], file: File, kind: str) -> tuple[Any, Iterator[Any]]:
    """Return the schema of a Parquet or Arrow file, and its rows in batches."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet", f"reading {file.name}") from error
    try:
        if kind == "parquet":
            names = parquet.ParquetFile(stream).schema_arrow.names
            check_names(names, file.path)
            return parquet_rows(stream, names)
        schema, batches = arrow_rows(stream)
    except arrow.ArrowException as error:
        raise _unreadable(file, kind, error) from error
    check_names(schema.names, file.path)
    return schema, batches


def _unreadable(file: File, kind: str, error: Exception) -> DamagedData:
    name = "Parquet" if kind == "parquet" else "Arrow"
    because = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DamagedData(f"{file.path} is not a readable {name} file", because, "write or download it again")


def label_names(listing: CorpusFiles, column: str) -> tuple[str, ...]:
    """Return the names that the package `datasets` keeps of a column of class numbers; none where there are none."""
    file = listing.files[0]
    kind = kind_of(file.name)
    if kind not in ("parquet", "arrow"):
        return ()
    with opened(file) as stream:
        if kind == "parquet":
            import pyarrow.parquet as parquet

            schema = parquet.ParquetFile(stream).schema_arrow
        else:
            schema = arrow_rows(stream)[0]
    told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = told.get("info", {}).get("features", {}).get(column, {})
    # Of a list of classes, in today's way of writing it and in an older one.
    feature = feature[0] if isinstance(feature, list) and feature else feature
    feature = feature.get("feature", feature) if isinstance(feature, dict) else {}
    return tuple(map(str, feature.get("names", ())))
