"""Declared: what every dataclass of a spec is made through, whoever makes it: a file, the command line or Python.

A value given in Python keeps the same declarations as one in a file: units as text, choices, types, ranges. All that is
wrong with a table is told at once, with the place of the caller.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, cast

from paceline.config.given import settled
from paceline.config.other_words import option_meant
from paceline.config.problems import Problems
from paceline.config.shape import ShapedTable, table_of
from paceline.config.values import literal
from paceline.errors import ConfigError
from paceline.uncaught import end_with_code

_FROM_FILE: ContextVar[bool] = ContextVar("_FROM_FILE", default=False)
_BETWEEN = ("dataclasses", "functools", "contextlib", "copy")  # modules that stand between a caller and the package


@functools.cache
def declared_table(cls: type) -> ShapedTable:
    """Return the table that a dataclass declares, read once."""
    return table_of(cls)


class Declared:
    """A table of a spec. `table` is its name in a file: "task.schedule"."""

    table_name: ClassVar[str] = ""
    _stated: ClassVar[frozenset[str]] = frozenset()  # of an instance: the names of the options that it was made with

    def __init_subclass__(cls, table: str = "", **rest: object) -> None:
        super().__init_subclass__(**rest)
        cls.table_name = table or cls.table_name

    def __new__(cls, *values: object, **named: object) -> Declared:
        """Return an empty instance. Raises ConfigError for names that the table lacks, which `__init__` cannot tell."""
        fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # each is a dataclass
        with told_at_caller() as problems:
            for name in named:
                if name not in fields:
                    problems.add(_unknown(cls, name, fields))
            if problems:  # no instance is made: what else is wrong is told along
                table: Any = declared_table(cast(Any, cls))
                for name in named:
                    if name in table.members:
                        with problems.noting():
                            settled(table.members[name], _key(cls, name), named[name])
            if len(values) > len(fields):
                problems.add(_too_many(cls, values, fields))
            for name in fields[: len(values)]:
                if name in named:
                    problems.add(ConfigError(f"{_key(cls, name)} is given twice", f"{cls.__name__} has it by its place "
                                             "and by its name", f"{name}=..."))  # fmt: skip
        made = super().__new__(cls)
        object.__setattr__(made, "_stated", frozenset([*fields[: len(values)], *named]))
        return made

    def __post_init__(self) -> None:
        """Replace every value by what the table holds for it. Raises ConfigError, with all that is wrong."""
        with told_at_caller() as problems:
            cls: Any = type(self)
            for name, member in declared_table(cls).members.items():
                with problems.noting():
                    object.__setattr__(self, name, settled(member, _key(cls, name), getattr(self, name)))
            if not problems:
                with problems.noting():
                    self.refuse_contradictions()

    def states(self, name: str) -> bool:
        """Return whether whoever made the table gave this option, and did not leave it to its default."""
        return name in self._stated

    def refuse_contradictions(self) -> None:
        """Raise ConfigError where options of the table contradict each other. A table may have rules of its own."""


@contextmanager
def told_at_caller() -> Iterator[Problems]:
    """Yield what takes problems; raise them at the end with the caller's place, unless a file's are being read."""
    problems = Problems()
    yield problems
    if not problems:
        return
    if _FROM_FILE.get():
        problems.raise_all()
    end_with_code()
    problems.raise_all(caller())


@contextmanager
def from_file() -> Iterator[None]:
    """Within it tables are made of a file's values, whose places are known: no caller in Python is named."""
    token = _FROM_FILE.set(True)
    try:
        yield
    finally:
        _FROM_FILE.reset(token)


def caller() -> str:
    """Return "script.py:12", the line outside of the package that made or called something; "" at a prompt."""
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        package = str(frame.f_globals.get("__package__") or "")
        if "paceline" not in (name.partition(".")[0], package.partition(".")[0]) and name not in _BETWEEN:
            file = Path(frame.f_code.co_filename)
            return f"{file.name}:{frame.f_lineno}" if file.is_file() and file.name != "paceline" else ""
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return ""


def _key(cls: type[Declared], name: str) -> str:
    return f"{cls.table_name}.{name}" if cls.table_name else name


def _unknown(cls: type[Declared], name: str, fields: list[str]) -> ConfigError:
    return ConfigError(
        f"unknown option '{_key(cls, name)}'", f"{cls.__name__} has no '{name}'", option_meant(name, fields)
    )


def _too_many(cls: type[Declared], values: tuple[object, ...], fields: list[str]) -> ConfigError:
    first = literal(values[len(fields)])
    because = f"{cls.__name__} has {len(fields)} options, and {len(values)} values were given"
    return ConfigError(f"{cls.__name__}: nothing takes the value {first}", because, "name the options")
