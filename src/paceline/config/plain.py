"""A typed spec as plain data and as TOML text: the inverse of `config.build`, exact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from paceline.config.build import dotted
from paceline.config.document import KeyPath
from paceline.config.shape import Option, ShapedTable
from paceline.config.values import plain, toml, toml_key


def to_plain(table: ShapedTable, instance: object) -> dict[str, object]:
    """Return the dataclass as nested plain data that JSON can hold and `mapping_layer` reads back.

    An object of the user's (a module, a data set, a function) becomes its import path, `package.module:name`.
    """
    values: dict[str, object] = {}
    for name, member in table.members.items():
        value = getattr(instance, name)
        if isinstance(member, ShapedTable):
            values[name] = to_plain(member, value) if isinstance(value, member.cls) else object_path(value)
        elif member.item is not None:
            values[name] = [to_plain(member.item, item) for item in value]
        elif member.kind == "texts" and member.objects:
            values[name] = [item if isinstance(item, str) else object_path(item) for item in value]
        elif member.kind == "text" and not isinstance(value, str | None):
            values[name] = object_path(value)
        elif member.kind == "free":
            values[name] = json.loads(json.dumps(value, default=object_path))  # a copy, and surely plain
        else:
            values[name] = plain(member, value)
    return values


def object_path(value: object) -> str:
    """Return `package.module:name` of a function or class, or of an instance's class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def flat_values(table: ShapedTable, instance: object) -> Iterator[tuple[str, object]]:
    """Yield (dotted key, plain value) of every option, and of every key of the user's own tables."""
    yield from _walk(to_plain(table, instance), ())


def _walk(values: Mapping[str, object], prefix: KeyPath) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _walk(value, (*prefix, name))
        else:
            yield dotted((*prefix, name)), value


def dump_toml(table: ShapedTable, instance: object, comment: Callable[[str, Option], str] | None = None) -> str:
    """Return the whole spec as TOML text that reads back as an equal spec.

    `comment(dotted key, option)` may add a comment to each line. Unset options are left out where that is their
    default. Raises nothing for objects of the user's: they are written as import paths.
    """
    lines: list[str] = []
    _dump(table, to_plain(table, instance), (), lines, comment or (lambda key, option: ""))
    return "\n".join(lines).strip() + "\n"


def _dump(
    table: ShapedTable,
    values: Mapping[str, object],
    prefix: KeyPath,
    lines: list[str],
    comment: Callable[[str, Option], str],
) -> None:
    nested: list[tuple[ShapedTable, KeyPath, Mapping[str, object]]] = []
    for name, member in table.members.items():
        key, value = (*prefix, name), values[name]
        if isinstance(member, ShapedTable) and isinstance(value, Mapping):
            nested.append((member, key, value))
        elif isinstance(member, ShapedTable):
            lines.append(f"{toml_key(name)} = {toml(value)}")
        elif value is not None or member.default is not None:
            note = comment(dotted(key), member)
            lines.append(f"{toml_key(name)} = {toml(value)}" + (f"  # {note}" if note else ""))
    for member, key, inner in nested:
        lines.extend(["", f"[{dotted(key)}]"])
        _dump(member, inner, key, lines, comment)
