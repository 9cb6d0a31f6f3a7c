"""From layers of values to one typed spec: defaults, the file, the command line. Every value keeps its origin."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.config.document import Key, TomlDocument
from paceline.config.shape import Option, Table
from paceline.config.values import check_free, convert, literal, toml_key, wrong_type
from paceline.errors import ConfigError, suggestion

DEFAULT = "default"


@dataclass(frozen=True)
class GivenValue:
    """A value as it was given, and where: "examples/x.toml:12" or "--set"."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Override:
    """One value from the command line, `text` in TOML syntax (text needs no quotes), and the option that gave it."""

    key: str
    text: str
    origin: str = "--set"


Layer = dict[Key, GivenValue]


@dataclass(frozen=True)
class _Source:
    root: Table
    where: Callable[[Key], str]


def dotted(key: Key) -> str:
    """Return the key as it is written: "task.optimizer.lr"."""
    return ".".join(toml_key(part) for part in key)


def document_layer(table: Table, document: TomlDocument) -> Layer:
    """Return a file's values. Raises ConfigError with file and line at the first key that no table has."""
    return mapping_layer(table, document.values, document.where)


def mapping_layer(table: Table, values: Mapping[str, Any], where: Callable[[Key], str]) -> Layer:
    """Return nested values as a flat layer; `where` tells the origin of a key."""
    layer: Layer = {}
    _flatten(table, values, _Source(table, where), (), layer)
    return layer


def override_layer(table: Table, override: Override) -> Layer:
    """Return the one value (or the inline table) of an override as a layer."""
    where = override.origin
    parts = tuple(part.strip() for part in override.key.split("."))
    if not all(parts):
        raise ConfigError(
            f"{where}: '{override.key}' is not a key", "a key has the form table.name", "--set task.optimizer.lr=1e-3"
        )
    if not override.text.strip():
        raise ConfigError(
            f"{where}: no value for '{override.key}'", "a value follows the '='", f"--set {override.key}=VALUE"
        )
    value = _typed(_member(table, parts), override.text.strip(), where)
    for part in reversed(parts):
        value = {part: value}
    return mapping_layer(table, value, lambda key: override.origin)


def parse_override(text: str) -> Override:
    """Return the override that `KEY=VALUE` states."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set '{text}' sets nothing", "it has the form KEY=VALUE", "--set task.optimizer.lr=1e-3")
    return Override(key.strip(), value)


def overlay(layers: Iterable[Layer]) -> Layer:
    """Return one layer in which later values replace earlier ones, also where one is a table and the other is not."""
    merged: Layer = {}
    for layer in layers:
        for key, entry in layer.items():
            for other in [other for other in merged if _clash(key, other)]:
                del merged[other]
            merged[key] = entry
    return merged


def build(table: Table, layer: Layer) -> tuple[Any, dict[str, str]]:
    """Return the table's dataclass with the layer's values, and the origin of every option by dotted key.

    Raises ConfigError, with the origin of the value, for a wrong type, choice, range or unit.
    """
    origins: dict[str, str] = {}
    return _build(table, layer, (), origins), origins


def _build(table: Table, layer: Layer, prefix: Key, origins: dict[str, str]) -> Any:
    arguments: dict[str, Any] = {}
    for name, member in table.members.items():
        key = (*prefix, name)
        if isinstance(member, Table):
            arguments[name] = _build(member, layer, key, origins)
        elif member.kind == "free":
            given = {other: entry for other, entry in layer.items() if other[: len(key)] == key}
            if given:
                arguments[name] = _nest(given, key)
            origins.update({dotted(other): entry.origin for other, entry in given.items()} or {dotted(key): DEFAULT})
        elif member.item is not None and key in layer:
            origins[dotted(key)] = layer[key].origin
            arguments[name] = tuple(_items(member, layer[key], key))
        elif key in layer:
            entry = layer[key]
            origins[dotted(key)] = entry.origin
            with _located(entry.origin):
                arguments[name] = convert(member, dotted(key), entry.value)
        else:
            origins[dotted(key)] = DEFAULT
    return table.cls(**arguments)


def _items(member: Option, entry: GivenValue, key: Key) -> Iterator[Any]:
    """Yield the dataclasses of a list of tables. Raises ConfigError, with the origin, for what is none."""
    assert member.item is not None
    if not isinstance(entry.value, list | tuple):
        with _located(entry.origin):
            raise wrong_type(member, dotted(key), entry.value)
    for number, values in enumerate(entry.value, 1):
        at = (*key, str(number))
        layer: Layer = {}
        if not isinstance(values, Mapping):
            what = f"{entry.origin}: {dotted(at)} = {literal(values)} is not a table"
            raise ConfigError(what, f"it holds options: {', '.join(member.item.members)}", f"[[{dotted(key)}]]")
        _flatten(member.item, values, _Source(member.item, lambda _: entry.origin), (), layer)
        with _located(f"{dotted(at)}"):
            yield _build(member.item, layer, (), {})


@contextmanager
def _located(origin: str) -> Iterator[None]:
    """Puts the origin of a value before the message of a ConfigError raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.what}", error.because, error.try_) from error


def _flatten(table: Table, values: Any, source: _Source, prefix: Key, layer: Layer) -> None:
    if not isinstance(values, Mapping):
        name = dotted(prefix)
        example = f"[{name}] with options {', '.join(table.members)}"
        raise ConfigError(
            f"{source.where(prefix)}: {name} = {literal(values)} is not a table", "it holds options", example
        )
    for name, value in values.items():
        key = (*prefix, name)
        member = table.members.get(name)
        if member is None:
            raise _unknown(table, key, source)
        if isinstance(member, Table):
            short = bool(member.shorthand) and isinstance(value, str)
            _flatten(member, {member.shorthand: value} if short else value, source, key, layer)
        elif member.kind == "free":
            with _located(source.where(key)):
                if not isinstance(value, Mapping):
                    raise wrong_type(member, dotted(key), value)
                check_free(dotted(key), value)
            _flatten_free(value, source, key, layer)
        else:
            layer[key] = GivenValue(value, source.where(key))


def _flatten_free(values: Mapping[str, Any], source: _Source, prefix: Key, layer: Layer) -> None:
    for name, value in values.items():
        key = (*prefix, name)
        if isinstance(value, Mapping) and value:
            _flatten_free(value, source, key, layer)
        else:
            layer[key] = GivenValue(value, source.where(key))


def _nest(entries: Mapping[Key, GivenValue], prefix: Key) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, entry in entries.items():
        *parents, last = key[len(prefix) :]
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = entry.value
    return nested


def _clash(key: Key, other: Key) -> bool:
    shared = min(len(key), len(other))
    return key[:shared] == other[:shared]


def _member(table: Table, key: Key) -> Option | Table | None:
    member: Option | Table | None = table
    for part in key:
        member = member.members.get(part) if isinstance(member, Table) else None
    if isinstance(member, Table) and member.shorthand:
        return member.members[member.shorthand]
    return member


def _typed(member: Option | Table | None, text: str, where: str) -> Any:
    """Return the value of command-line text: TOML, or text without quotes where the option takes text."""
    try:
        values = tomllib.loads(f"value = {text}")
        value = values["value"] if list(values) == ["value"] else text
    except (ValueError, RecursionError) as error:
        if text[0] in "\"'[{":
            raise ConfigError(
                f"{where}: {text} is not a value", str(error), "TOML's syntax, in the shell's quotes"
            ) from error
        value = text
    if isinstance(member, Option):
        if member.kind == "text" and not isinstance(value, str | list | dict):
            return text  # --set task.name=2026 is text
        if member.kind == "texts" and isinstance(value, str):
            return [value]
    return value


def _unknown(table: Table, key: Key, source: _Source) -> ConfigError:
    """Return the error for a key that the table lacks, with a key of that name elsewhere, or the nearest one here."""
    elsewhere = [dotted(other) for other in source.root.every_key() if other[-1] == key[-1]]
    return ConfigError(
        f"{source.where(key)}: unknown key '{dotted(key)}'",
        f"[{dotted(key[:-1])}] has no such option" if key[:-1] else "a spec has no such table",
        f"did you mean '{elsewhere[0]}'?" if elsewhere else suggestion(key[-1], table.members),
    )
