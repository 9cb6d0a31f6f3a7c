"""Columns within columns: `meta.text` is the field `text` of a column `meta` that holds fields of its own.

A column that has the whole name is that column, whatever stands before its dot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MISSING = object()


def value_of(record: Mapping[str, object], name: str) -> object:
    """Return what a record has under a name, or the field of its fields that the name's dots lead to; MISSING for none.

    A column of fields that is null has null in each of them.
    """
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    if not dot or first not in record:
        return MISSING
    inner = record[first]
    return value_of(inner, rest) if isinstance(inner, Mapping) else None if inner is None else MISSING


def with_asked(record: dict[str, object], asked: Iterable[str]) -> dict[str, object]:
    """Return a record with the fields of its fields that are asked for by their whole names."""
    found = {name: value for name in asked if (value := value_of(record, name)) is not MISSING}
    return {**record, **found} if found.keys() - record.keys() else record


def type_of(schema: Any, name: str) -> Any:
    """Return Arrow's type of a column, or of a field of its fields; None where the schema has none of that name."""
    at = schema.get_field_index(name)
    if at >= 0:
        return schema.field(at).type
    first, dot, rest = name.partition(".")
    at = schema.get_field_index(first) if dot else -1
    return type_of(schema.field(at).type, rest) if at >= 0 and is_of_fields(schema.field(at).type) else None


def is_of_fields(kind: object) -> bool:
    """Return whether Arrow's type is one of fields."""
    return str(kind).startswith("struct<")


def leaves(schema: Any, before: str = "") -> list[str]:
    """Return the whole names of an Arrow schema's columns, those of fields as their fields."""
    names: list[str] = []
    for field in schema:
        whole = f"{before}{field.name}"
        names += leaves(field.type, f"{whole}.") if is_of_fields(field.type) else [whole]
    return names


def fields_of(values: Mapping[str, object], column: str) -> Sequence[str]:
    """Return the whole names of the fields of a column that holds text, for people to choose from."""
    return [f"{column}.{name}" for name, value in values.items() if isinstance(value, str)]
