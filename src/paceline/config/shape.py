"""The shape of a spec: its tables and options, read from the dataclasses that declare them.

The loader, `--set`, the JSON schema and the reference in the docs all walk this one tree.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.fields import HeldWord
from paceline.units import AMOUNT_UNITS

KINDS = ("text", "texts", "whole", "number", "flag", "amount", "duration", "bytes", "free", "tables")
_KIND_OF_TYPE = {str: "text", int: "whole", float: "number", bool: "flag", dict: "free", tuple: "texts"}


@dataclass(frozen=True)
class Option:
    """One option: what kind of value it takes and the rules the value must keep (see `fields.option`).

    `kind` is one of KINDS; "free" is a table of the user's own keys, "tables" a list of tables of the shape `item`
    (in a file `[[task.optimizer.groups]]`). An `optional` one may be unset.
    """

    name: str
    kind: str
    optional: bool
    default: Any
    doc: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    units: tuple[str, ...] = AMOUNT_UNITS
    item: ShapedTable | None = None
    words: Mapping[str, HeldWord] = dataclasses.field(default_factory=dict)
    objects: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class ShapedTable:
    """A dataclass as a table. Where `shorthand` is set, a string in the table's place is the value of that option."""

    name: str
    cls: type
    doc: str
    members: dict[str, Option | ShapedTable]
    shorthand: str = ""
    objects: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def options(self, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Option]]:
        """Yield every option below this table with its full key, in the order of declaration."""
        for name, member in self.members.items():
            if isinstance(member, ShapedTable):
                yield from member.options((*prefix, name))
            else:
                yield (*prefix, name), member

    def every_key(self, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        """Yield the full key of every option and table below this table."""
        for name, member in self.members.items():
            yield (*prefix, name)
            if isinstance(member, ShapedTable):
                yield from member.every_key((*prefix, name))


def table_of(
    cls: type, name: str = "", doc: str = "", shorthand: bool = False, objects: Mapping[str, str] | None = None
) -> ShapedTable:
    """Return the table that a dataclass declares.

    A field whose type is a dataclass is a sub-table. So is a field typed Any whose default is made by a dataclass:
    Python code may put an object there, and a file may put a string there, the value of the sub-table's first option.
    Any other field typed Any takes the type of its default.
    """
    hints = _hints_of(cls)
    members: dict[str, Option | ShapedTable] = {}
    for field in dataclasses.fields(cls):
        if "doc" not in field.metadata:  # no option: what a spec knows of itself
            continue
        hint, optional = _without_none(hints[field.name])
        nested = field.default_factory if hint is Any else hint
        if isinstance(nested, type) and dataclasses.is_dataclass(nested) and not field.metadata["quantity"]:
            rules = field.metadata
            members[field.name] = table_of(nested, field.name, rules["doc"], hint is Any, rules["objects"])
        else:
            members[field.name] = _option(field, hint, optional)
    doc = doc or (cls.__doc__ or "").split("\n")[0]
    return ShapedTable(name, cls, doc, members, next(iter(members)) if shorthand else "", objects or {})


@functools.cache
def _hints_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields: read once, since many tables hold the same one."""
    return typing.get_type_hints(cls)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kept = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        assert len(kept) == 1, f"an option has one type, or one type and None: {hint}"
        return kept[0], True
    return hint, False


def _option(field: dataclasses.Field[Any], hint: Any, optional: bool) -> Option:
    factory = field.default_factory
    default = factory() if callable(factory) else field.default
    rules = field.metadata
    base = type(default) if hint is Any else typing.get_origin(hint) or hint
    of = next(iter(typing.get_args(hint)), None)
    item = table_of(of, field.name) if base is tuple and isinstance(of, type) and dataclasses.is_dataclass(of) else None
    kind = "tables" if item else rules["quantity"] or _KIND_OF_TYPE[base]
    return Option(
        name=field.name, kind=kind, optional=optional, default=default, item=item,
        doc=rules["doc"], choices=rules["choices"], minimum=rules["minimum"], above=rules["above"],
        maximum=rules["maximum"], units=rules["units"] or AMOUNT_UNITS, words=rules["words"],
        objects=rules["objects"],
    )  # fmt: skip
