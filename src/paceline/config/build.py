"""From layers of values to one typed spec: defaults, the file, the command line. Every value keeps its origin."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.config.declared import from_file
from paceline.config.document import KeyPath, TomlDocument
from paceline.config.other_words import option_meant
from paceline.config.problems import Problems
from paceline.config.shape import Option, ShapedTable
from paceline.config.values import check_free, convert, literal, toml_key, wrong_type
from paceline.errors import ConfigError

DEFAULT = "default"


@dataclass(frozen=True)
class GivenValue:
    """A value as it was given, and where: "examples/x.toml:12" or "--set"."""

    value: Any
    origin: str
    where: Callable[[KeyPath], str] | None = None  # of keys within it, where it is a list of tables


@dataclass(frozen=True)
class Override:
    """One value from the command line, `text` in TOML syntax (text needs no quotes), and the option that gave it."""

    key: str
    text: str
    origin: str = "--set"


GivenLayer = dict[KeyPath, GivenValue]


@dataclass(frozen=True)
class _Source:
    root: ShapedTable
    where: Callable[[KeyPath], str]
    problems: Problems


def dotted(key: KeyPath) -> str:
    """Return the key as it is written: "task.optimizer.lr"."""
    return ".".join(toml_key(part) for part in key)


def document_layer(table: ShapedTable, document: TomlDocument, problems: Problems | None = None) -> GivenLayer:
    """Return a file's values. Raises ConfigError with file and line of every key that no table has."""
    return mapping_layer(table, document.values, document.where, problems)


def mapping_layer(
    table: ShapedTable, values: Mapping[str, object], where: Callable[[KeyPath], str], problems: Problems | None = None
) -> GivenLayer:
    """Return nested values as a flat layer; `where` tells the origin of a key.

    What is wrong is added to `problems`, or raised, all of it, where there are none.
    """
    layer: GivenLayer = {}
    found = Problems() if problems is None else problems
    with found.noting():
        _flatten(table, values, _Source(table, where, found), (), layer)
    if problems is None:
        found.raise_all()
    return layer


def override_layer(table: ShapedTable, override: Override, problems: Problems | None = None) -> GivenLayer:
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
    if value == {}:
        there = _at(table, parts)
        options = list(there.members) if isinstance(there, ShapedTable) else []
        raise ConfigError(
            f"{where}: {override.key} = {{}} sets nothing",
            "options of a table are added to those that are there, and an empty table has none",
            f"{where} {override.key}.{options[0] if options else 'NAME'}=VALUE",
        )
    for part in reversed(parts):
        value = {part: value}
    return mapping_layer(table, value, lambda key: override.origin, problems)


def parse_override(text: str) -> Override:
    """Return the override that `KEY=VALUE` states."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set '{text}' sets nothing", "it has the form KEY=VALUE", "--set task.optimizer.lr=1e-3")
    return Override(key.strip(), value)


def overlay(layers: Iterable[GivenLayer]) -> GivenLayer:
    """Return one layer in which later values replace earlier ones, also where one is a table and the other is not."""
    merged: GivenLayer = {}
    for layer in layers:
        for key, entry in layer.items():
            for other in [other for other in merged if _clash(key, other)]:
                del merged[other]
            merged[key] = entry
    return merged


def build(table: ShapedTable, layer: GivenLayer, problems: Problems | None = None) -> tuple[Any, dict[str, str]]:
    """Return the table's dataclass with the layer's values, and the origin of every option by dotted key.

    Raises ConfigError, with the origin of each value, for wrong types, choices, ranges and units, and for `problems`
    that were found before.
    """
    origins: dict[str, str] = {}
    problems = Problems() if problems is None else problems
    with from_file():
        built = _build(table, layer, (), _Built(origins, problems))
    problems.raise_all()
    return built, origins


@dataclass(frozen=True)
class _Built:
    """What building a table finds out besides: the origin of every option, and what is wrong."""

    origins: dict[str, str]
    problems: Problems


def _build(table: ShapedTable, layer: GivenLayer, prefix: KeyPath, found: _Built) -> Any:
    """Return the table's dataclass; None where something in it is wrong, which is in `found`."""
    arguments: dict[str, object] = {}
    origins, problems, before = found.origins, found.problems, len(found.problems)
    for name, member in table.members.items():
        key = (*prefix, name)
        if isinstance(member, ShapedTable):
            arguments[name] = _build(member, layer, key, found)
        elif member.kind == "free":
            given = {other: entry for other, entry in layer.items() if other[: len(key)] == key}
            if given:
                arguments[name] = _nest(given, key)
            origins.update({dotted(other): entry.origin for other, entry in given.items()} or {dotted(key): DEFAULT})
        elif member.item is not None and key in layer:
            origins[dotted(key)] = layer[key].origin
            with problems.noting():
                arguments[name] = tuple(_items(member, layer[key], key, problems))
        elif key in layer:
            entry = layer[key]
            origins[dotted(key)] = entry.origin
            with problems.noting(entry.origin):
                arguments[name] = convert(member, dotted(key), entry.value)
        else:
            origins[dotted(key)] = DEFAULT
    if len(problems) > before:
        return None
    with problems.noting(_origin_of(layer, prefix)):
        return table.cls(**arguments)
    return None


def _origin_of(layer: GivenLayer, prefix: KeyPath) -> str:
    """Return where the first of a table's values stands; "" where it has none."""
    return next((entry.origin for key, entry in layer.items() if prefix and key[: len(prefix)] == prefix), "")


def _items(member: Option, entry: GivenValue, key: KeyPath, problems: Problems) -> Iterator[object]:
    """Yield the dataclasses of a list of tables. Raises ConfigError, with the origin, for what is none."""
    assert member.item is not None
    if not isinstance(entry.value, list | tuple):
        with _located(entry.origin):
            raise wrong_type(member, dotted(key), entry.value)
    for number, values in enumerate(entry.value, 1):
        at = (*key, str(number))
        where = entry.where or (lambda _: entry.origin)
        layer: GivenLayer = {}
        if not isinstance(values, Mapping):
            what = f"{where(at)}: {dotted(at)} = {literal(values)} is not a table"
            raise ConfigError(what, f"it holds options: {', '.join(member.item.members)}", f"[[{dotted(key)}]]")
        _flatten(member.item, values, _Source(member.item, where, problems), at, layer)
        yield _build(member.item, layer, at, _Built({}, problems))


@contextmanager
def _located(origin: str) -> Iterator[None]:
    """Puts the origin of a value before the message of a ConfigError raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.what}", error.because, error.try_) from error


def _flatten(table: ShapedTable, values: object, source: _Source, prefix: KeyPath, layer: GivenLayer) -> None:
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
            source.problems.add(_unknown(table, key, source))
        elif isinstance(member, ShapedTable):
            short = bool(member.shorthand) and isinstance(value, str)
            with source.problems.noting():
                _flatten(member, {member.shorthand: value} if short else value, source, key, layer)
        elif member.kind == "free":
            with source.problems.noting(source.where(key)):
                if not isinstance(value, Mapping):
                    raise wrong_type(member, dotted(key), value)
                check_free(dotted(key), value)
                _flatten_free(value, source, key, layer)
        else:
            inner = source.where if member.item is not None else None
            layer[key] = GivenValue(value, source.where(key), inner)


def _flatten_free(values: Mapping[str, object], source: _Source, prefix: KeyPath, layer: GivenLayer) -> None:
    for name, value in values.items():
        key = (*prefix, name)
        if isinstance(value, Mapping) and value:
            _flatten_free(value, source, key, layer)
        else:
            layer[key] = GivenValue(value, source.where(key))


def _nest(entries: Mapping[KeyPath, GivenValue], prefix: KeyPath) -> dict[str, object]:
    nested: dict[str, Any] = {}
    for key, entry in entries.items():
        *parents, last = key[len(prefix) :]
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = entry.value
    return nested


def _clash(key: KeyPath, other: KeyPath) -> bool:
    shared = min(len(key), len(other))
    return key[:shared] == other[:shared]


def _at(table: ShapedTable, key: KeyPath) -> Option | ShapedTable | None:
    member: Option | ShapedTable | None = table
    for part in key:
        member = member.members.get(part) if isinstance(member, ShapedTable) else None
    return member


def _member(table: ShapedTable, key: KeyPath) -> Option | ShapedTable | None:
    member = _at(table, key)
    if isinstance(member, ShapedTable) and member.shorthand:
        return member.members[member.shorthand]
    return member


def _typed(member: Option | ShapedTable | None, text: str, where: str) -> Any:
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


def _unknown(table: ShapedTable, key: KeyPath, source: _Source) -> ConfigError:
    """Return the error for a key that the table lacks, with a key of that name elsewhere, or the nearest one here.

    What is written in a table may stand above it with the table's name before it: `run.checkpoints.every` is
    `run.checkpoint_every`.
    """
    joined = [(*key[:-2], f"{name}_{key[-1]}") for name in (key[-2], key[-2].removesuffix("s"))] if key[1:] else []
    known = list(source.root.every_key())
    elsewhere = [dotted(other) for other in joined if other in known]
    elsewhere += [dotted(other) for other in known if other[-1] == key[-1]]
    return ConfigError(
        f"{source.where(key)}: unknown key '{dotted(key)}'",
        f"[{dotted(key[:-1])}] has no such option" if key[:-1] else "there is no such table",
        option_meant(key[-1], table.members, elsewhere),
    )
