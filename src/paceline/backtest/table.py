"""Reads a table of measurements (CSV, JSON Lines or Parquet) into typed rows. Says where a cell cannot be read."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.backtest.schema import KINDS, AnyRow, Origin
from paceline.errors import DataError, MissingExtra, suggestion

SUFFIXES = (".csv", ".jsonl", ".parquet")
# What stands in a cell of numbers that has none.
NOTHING = ("n/a", "na", "none", "null", "nil", "-", "–", "?", "unknown", "not stated")
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
_ORIGIN = {field.name for field in dataclasses.fields(Origin)}


@dataclass(frozen=True)
class MeasuredTable:
    """A file of measurements: its kind, its rows, and the columns that were not read."""

    file: str
    kind: str
    rows: tuple[AnyRow, ...]
    ignored_columns: tuple[str, ...]


def read_table(path: Path) -> MeasuredTable:
    """Return the table in a file. Cells that cannot be read are named in their row; the file goes on.

    Raises DataError for a file that cannot be read, has no rows, or has the columns of no known table, and
    MissingExtra for Parquet without pyarrow.
    """
    lines = list(_lines(path))
    if not lines:
        raise DataError(f"{path} has no rows", "a table has a line of column names and rows under it", _columns_fix())
    columns = tuple(dict.fromkeys(name for _, cells in lines for name in cells))
    kind = _kind(path, columns)
    row_type, _ = KINDS[kind]
    types = {field.name: str(field.type) for field in dataclasses.fields(row_type) if field.name not in _ORIGIN}
    rows = tuple(_row(row_type, types, str(path), line, cells) for line, cells in lines)
    return MeasuredTable(str(path), kind, rows, tuple(name for name in columns if name not in types))


def _kind(path: Path, columns: tuple[str, ...]) -> str:
    for kind, (_, signature) in KINDS.items():
        if all(name in columns for name in signature):
            return kind
    wanted = KINDS["steps"][1]
    missing = [name for name in wanted if name not in columns]
    raise DataError(
        f"{path}: line 1 has the columns of no table that can be tested against",
        f"a table of steps needs {', '.join(wanted)}; it lacks {', '.join(missing)}",
        suggestion(missing[0], columns),
    )


def _columns_fix() -> str:
    return f"columns such as {', '.join(KINDS['steps'][1])}"


def _lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, cells by column) of a file; lines count from 1, the line of column names included."""
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} is not a table", f"its name does not end in {', '.join(SUFFIXES)}", "a .csv file")
    try:
        if path.suffix == ".parquet":
            yield from enumerate(_parquet_rows(path), start=1)
        elif path.suffix == ".jsonl":
            yield from _json_rows(path)
        else:
            yield from _csv_rows(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read", str(error), "a readable file in UTF-8") from error


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for cells in reader:
            if None in cells or None in cells.values():
                found = sum(value is not None for name, value in cells.items() if name) + len(cells.get(None) or ())
                raise DataError(
                    f"{path}:{reader.line_num}: {found} cells", f"line 1 names {len(reader.fieldnames or ())} columns",
                    "quote cells that hold commas",
                )  # fmt: skip
            yield reader.line_num, dict(cells)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                cells = json.loads(text)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{line}: not JSON", str(error), "one JSON object per line") from error
            if not isinstance(cells, dict):
                raise DataError(f"{path}:{line}: not an object", f"it is {text.strip()[:40]}", "one object per line")
            yield line, cells


def _parquet_rows(path: Path) -> Iterator[dict[str, object]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet", f"reading {path}") from error
    try:
        yield from pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} cannot be read", str(error), "a Parquet file") from error


def _row(row_type: type[AnyRow], types: dict[str, str], file: str, line: int, cells: dict[str, object]) -> AnyRow:
    values: dict[str, Any] = {}
    problems = []
    for name, kind in types.items():
        cell = cells.get(name)
        if cell is None or cell == "" or (isinstance(cell, float) and math.isnan(cell)):
            continue
        try:
            value = _value(cell, kind)
            values |= {} if value is None else {name: value}
        except (ValueError, TypeError):
            problems.append(f"{name} = {cell!r} is not a {'whole ' if 'int' in kind else ''}number")
    return row_type(file=file, line=line, problem="; ".join(problems), **values)


def _value(cell: Any, kind: str) -> object:
    """Return a cell as the type of its column, None where it says that there is none. Raises ValueError for others.

    Example: "12,288" is 12288, "45%" is 0.45, "n/a" is None; "3,5" is no number.
    """
    if kind == "str":
        return str(cell).strip()
    if isinstance(cell, str):
        plain = cell.strip().replace("\u202f", "").replace(",", "" if THOUSANDS.fullmatch(cell.strip()) else ",")
        if plain.lower() in NOTHING:
            return None
        number = float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
    else:
        number = float(cell)
    if not 0 <= number < math.inf or (kind.startswith("int") and number != int(number)):
        raise ValueError(cell)
    return int(number) if kind.startswith("int") else number
