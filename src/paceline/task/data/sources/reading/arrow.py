"""Rows of Parquet and Arrow files as plain values. Needs the extra 'parquet'.

A value that cannot be had (bytes that are no text, a time that Python's types cannot hold) is an `UnreadableValue`, so
that a column nobody asked for stops nothing, and one that is asked for says what is wrong, row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from paceline.errors import DamagedData, suggestion
from paceline.task.data.sources.reading.nested import leaves, type_of

PARQUET_ROWS = 1024
TEXTS = ("string", "large_string", "string_view")
BYTES = ("binary", "large_binary", "binary_view")  # what programs write that do not mark a column of texts as one


@dataclass(frozen=True)
class UnreadableValue:
    """A value of a table that has no value in Python, and why."""

    because: str

    def __str__(self) -> str:
        return f"a value that cannot be read: {self.because}"


def parquet_rows(stream: IO[bytes], columns: Sequence[str]) -> tuple[Any, Iterator[Any]]:
    """Return the schema, and the rows in batches, of those of the columns that are there."""
    import pyarrow.parquet as parquet

    table = parquet.ParquetFile(stream)
    names = [name for name in columns if type_of(table.schema_arrow, name) is not None]
    return table.schema_arrow, table.iter_batches(batch_size=PARQUET_ROWS, columns=names)


def arrow_rows(stream: IO[bytes]) -> tuple[Any, Iterator[Any]]:
    """Return the schema, and the rows in batches, of a file or a stream of Arrow's IPC format; all its columns."""
    import pyarrow as arrow

    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not is_file:
        reader = arrow.ipc.open_stream(stream)
        return reader.schema, iter(reader)
    whole = arrow.ipc.open_file(stream)
    return whole.schema, (whole.get_batch(number) for number in range(whole.num_record_batches))


def plain_rows(batch: Any, columns: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield the rows of a batch, each as its values in these columns by name; "a.b" is a field of column a."""
    values = [_plain(_column(batch, name)) for name in columns]
    for row in range(batch.num_rows):
        yield {name: column[row] for name, column in zip(columns, values, strict=True)}


def _column(batch: Any, name: str) -> Any:
    import pyarrow.compute as compute

    at = batch.schema.get_field_index(name)
    if at >= 0:
        return batch.column(at)
    first, _, rest = name.partition(".")
    column = batch.column(batch.schema.get_field_index(first))
    while rest:
        fields = [column.type.field(number).name for number in range(column.type.num_fields)]
        step, rest = (rest, "") if rest in fields else (rest.partition(".")[0], rest.partition(".")[2])
        column = compute.struct_field(column, step)  # null where the fields around it are
    return column


def _plain(column: Any) -> list[Any]:
    """Return a column's values; one by one only where not all of them can be had. Bytes are taken for UTF-8."""
    if _values_in(column.type) in BYTES:
        return [_decoded(value) for value in column.to_pylist()]
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError, KeyError):  # of Arrow's and of Python's conversions
        return [_plain_value(column, row) for row in range(len(column))]


def _decoded(value: bytes | None) -> str | UnreadableValue | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return UnreadableValue(f"byte {error.start:,} is 0x{value[error.start]:02x}, so it is no UTF-8 text")


def _plain_value(column: Any, row: int) -> object:
    try:
        return column[row].as_py()
    except (ValueError, OverflowError, KeyError) as error:
        return UnreadableValue(str(error).splitlines()[0] if str(error) else type(error).__name__)


def check_names(names: Sequence[str], path: str) -> None:
    """Raise DamagedData where two columns have one name: which of them is meant cannot be told."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DamagedData(
            f"{path} has {names.count(twice[0])} columns '{twice[0]}'", "which of them is meant cannot be told",
            "write it again with a name for each column",
        )  # fmt: skip


def named_text(field: str, texts: Sequence[str], columns: Iterable[str]) -> str:
    """Return what to write where there is no `field`: which of the `texts`, and how labels beside it are named."""
    near = suggestion(field, texts)
    near = f'text_field = "{texts[0]}"' if len(texts) == 1 and not near.startswith("did you") else near
    return f"{near}, and label_field for labels beside it" if set(columns) > set(texts[:1]) else near


def check_column(schema: Any, field: str, path: str) -> None:
    """Raise DamagedData unless the schema has one column `field` (or `a.b`, a field of a column), of text."""
    check_names([column.name for column in schema if column.name == field], path)
    columns = leaves(schema)
    kind = type_of(schema, field)
    if kind is None:
        texts = [name for name in columns if _is_text(type_of(schema, name))]
        near = named_text(field, texts, columns) if texts else "write the text into a column of strings"
        raise DamagedData(
            f"{path} has no column '{field}'",
            f"text_field names the column that holds the text; the file has {', '.join(columns) or 'no columns'}",
            near if columns else "write the text into a column",
        )
    if not _is_text(kind):
        strings = [name for name in columns if _is_text(type_of(schema, name))]
        raise DamagedData(
            f"{path}: column '{field}' is not text",
            f"it holds {kind}",
            f"text_field = one of: {', '.join(strings)}" if strings else "write the text into a column of strings",
        )


def _is_text(kind: object) -> bool:
    return _values_in(kind) in (*TEXTS, *BYTES)


def _values_in(kind: object) -> str:
    """Return the name of a type, of an encoded one that of its values."""
    return str(getattr(kind, "value_type", None) if str(kind).startswith("dictionary<") else kind)
