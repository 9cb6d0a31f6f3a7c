"""JSON Schema (draft 2020-12) of a spec file, for editors: completion, documentation and checks while typing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from paceline.config.shape import Option, ShapedTable
from paceline.config.values import UNSET, plain
from paceline.units import PREFIXES, SECONDS

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Rule: TypeAlias = "Mapping[str, Rule] | Sequence[Rule] | str | float | bool | None"  # a schema, or what stands in one
Schema: TypeAlias = dict[str, Rule]

_NUMBER = r"\s*([0-9][0-9_,]*(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+)\s*"


def json_schema(table: ShapedTable, title: str) -> Schema:
    """Return the schema of a spec whose root is the table."""
    return {"$schema": DRAFT, "title": title, **_table(table)}


def _table(table: ShapedTable) -> Schema:
    schema: Schema = {"type": "object", "additionalProperties": False}
    if table.doc:
        schema["description"] = table.doc
    schema["properties"] = {
        name: _shorthand(member) if isinstance(member, ShapedTable) else _option(member)
        for name, member in table.members.items()
    }
    return schema


def _shorthand(table: ShapedTable) -> Schema:
    if not table.shorthand:
        return _table(table)
    main = table.members[table.shorthand]
    text = {"type": "string", "description": f"short for {{ {table.shorthand} = ... }}: {main.doc}"}
    return {"description": table.doc, "anyOf": [text, _table(table)]}


def _option(option: Option) -> Schema:
    schema = _value(option)
    if option.optional:
        schema = {"anyOf": [schema, {"const": UNSET, "description": "leaves it unset"}]}
    if option.doc:
        schema["description"] = option.doc
    if option.default is not None:
        schema["default"] = plain(option, option.default)
    return schema


def _value(option: Option) -> Schema:
    bounds = {"minimum": option.minimum, "exclusiveMinimum": option.above, "maximum": option.maximum}
    rules = {name: bound for name, bound in bounds.items() if bound is not None}
    if option.kind == "bytes":
        size = {"type": "string", "pattern": _pattern([f"{prefix}B" for prefix in PREFIXES])}
        return {"anyOf": [{"type": "integer", **rules}, size]}
    chosen = {"enum": list(option.choices)}
    text: Schema = {"type": "string", **(chosen if option.choices else {})}
    if option.choices and option.objects:
        text = {"type": "string", "anyOf": [chosen, {"pattern": ":"}]}
    kinds: dict[str, Schema] = {
        "text": text,
        "texts": {"type": "array", "items": text},
        "whole": {"type": "integer", **rules},
        "number": {"type": "number", **rules},
        "flag": {"type": "boolean"},
        "free": {"type": "object"},
        "tables": {"type": "array", "items": _table(option.item) if option.item else {}},
        "duration": {"type": "string", "pattern": _pattern(list(SECONDS), repeats="+")},
        "amount": {"type": "string", "pattern": _pattern(_amount_units(option))},
    }
    if option.words:
        return {"anyOf": [kinds[option.kind], {"enum": list(option.words)}]}
    return kinds[option.kind]


def _amount_units(option: Option) -> list[str]:
    """Return every spelling of the option's units: with and without a prefix, plural and singular."""
    spelled = [spelling for unit in option.units for spelling in (unit, unit.removesuffix("s"))]
    return [f"{prefix} {unit}".strip() for prefix in PREFIXES for unit in spelled]


def _pattern(units: list[str], repeats: str = "") -> str:
    return f"^({_NUMBER}({'|'.join(units)})\\s*){repeats}$"  # units are letters and spaces: nothing to escape
