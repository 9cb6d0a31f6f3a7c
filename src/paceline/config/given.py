"""A value given in Python, made what the dataclass holds: by a file's rules, and typed values as they are."""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from paceline.config.fields import HeldWord
from paceline.config.shape import Option, ShapedTable
from paceline.config.values import check_free, convert, duration, kind_of, literal, plain, wrong_type
from paceline.errors import ConfigError
from paceline.units import Amount, Seconds


def settled(member: Option | ShapedTable, key: str, value: Any) -> object:
    """Return what a dataclass holds for a value of Python. Raises ConfigError, naming the key, for what breaks a rule.

    A table is taken as its dataclass, a dict of its options, or, where it has a main option, that option's text.
    """
    if isinstance(member, ShapedTable):
        return _table(member, key, value)
    if member.kind == "tables":
        return _tables(member, key, value)
    if member.kind == "free":
        return _free(member, key, value)
    if value is None and member.optional:
        return None
    if member.kind == "texts" and member.objects:
        if not isinstance(value, list | tuple):
            raise wrong_type(member, key, value)
        return tuple(_text_or_object(member, key, each) for each in value)
    if member.kind == "object" or (member.objects and not isinstance(value, str)):
        return _object(member, key, value)
    if member.kind == "duration" and (isinstance(value, Seconds) or _is_default(member, value)):
        return duration(member, key, value, value)
    if isinstance(value, HeldWord) and value in member.words.values():
        return value
    given = _as_in_a_file(member, value)
    if not isinstance(given, str | bool | int | float | list | tuple | dict):
        if member.kind == "text" and hasattr(given, "__getitem__"):
            raise _named_by_text(key, given)
        raise wrong_type(member, key, given)
    return convert(member, key, given)


def _named_by_text(key: str, value: object) -> ConfigError:
    return ConfigError(
        f"{key} = {literal(value)} cannot be used",
        f"it is {kind_of(value)}, and this table names its data by text",
        "Task(data=...) takes a data set itself, and the data set its collate function: dataset.collate = pad; "
        'or "module:factory" names what returns it',
    )


def reads_by_number(value: object) -> bool:
    """Return whether an object gives items by their number. torch's Dataset alone has that method for none."""
    reads = getattr(type(value), "__getitem__", None)
    return reads is not None and getattr(reads, "__qualname__", "") != "Dataset.__getitem__"


def _is_default(option: Option, value: object) -> bool:
    return type(value) is float and value == option.default


def _table(table: ShapedTable, key: str, value: object) -> Any:
    if isinstance(value, table.cls):
        return value
    if isinstance(value, Mapping) and not (table.objects and _names_objects(table, value)):
        return _made(table.cls, key, value)
    if isinstance(value, str) and table.shorthand:
        return table.cls(**{table.shorthand: value})
    if table.objects and not isinstance(value, str):
        return _object(table, key, value)
    if hasattr(value, "param_groups"):
        name, lr = type(value).__name__, value.param_groups[0].get("lr", 3e-4)
        raise ConfigError(
            f"{key} = {literal(value)} cannot be used",
            "it holds weights of a model that no run has: each device makes its own, of its part of the model",
            f'{{"name": "torch.optim:{name}", "lr": {lr:g}}}; its other arguments go into "arguments"',
        )
    first = next(iter(table.members))
    example = f"{first}={value!r}" if isinstance(value, str) else "..."
    raise ConfigError(
        f"{key} = {literal(value)} is no {table.cls.__name__}",
        f"it holds options: {', '.join(table.members)}",
        f"{table.cls.__name__}({example}), or a dict of options",
    )


def _names_objects(table: ShapedTable, value: Mapping[Any, Any]) -> bool:
    """Return whether a dict holds objects by names that are no options, such as the splits of a data set."""
    are_options = any(name in table.members for name in value)
    return bool(value) and not are_options and all(_is_held_by_name(each) for each in value.values())


def _is_held_by_name(value: object) -> bool:
    is_plain = isinstance(value, str | bytes | Mapping | list | tuple)
    return not is_plain and (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))


def _made(cls: Any, key: str, given: Mapping[Any, Any]) -> Any:
    """Return the dataclass of a table given as a dict. Raises ConfigError for names that are no text."""
    for name in given:
        if not isinstance(name, str):
            raise ConfigError(f"{key} has the key {literal(name)}", "names of options are text", f"'{name}'")
    return cls(**given)


def _tables(option: Option, key: str, value: object) -> tuple[object, ...]:
    assert option.item is not None
    if not isinstance(value, list | tuple):
        raise wrong_type(option, key, value)
    return tuple(_table(option.item, f"{key}.{number}", each) for number, each in enumerate(value, 1))


def _free(option: Option, key: str, value: object) -> object:
    """Return a table of the user's own keys. In Python it may hold objects, which stay as they are."""
    if not isinstance(value, Mapping):
        raise wrong_type(option, key, value)
    _check_keys(key, value)
    return value


def _check_keys(key: str, values: Mapping[object, object]) -> None:
    for name, value in values.items():
        if not isinstance(name, str):
            raise ConfigError(f"{key} has the key {literal(name)}", "names of arguments are text", f"'{name}'")
        if isinstance(value, Mapping):
            _check_keys(f"{key}.{name}", value)
        elif isinstance(value, float | int):
            check_free(f"{key}.{name}", value)


def _object(member: Option | ShapedTable, key: str, value: Any) -> object:
    """Return an object of the user's. Raises ConfigError where it is nothing that the option can use."""
    is_class = isinstance(value, type) and "__call__" not in member.objects  # it has what its objects will have
    fits = any(
        all(hasattr(value, name) for name in names.split())
        for names in member.objects
        if not (names == "__len__ __getitem__" and (isinstance(value, Mapping) or _gives_in_turn(value)))
    )
    if fits and not isinstance(value, bytes | bytearray) and not is_class:
        return value
    if is_class:
        raise ConfigError(
            f"{key} = {literal(value)} cannot be used", "it is a class, and an object of it is wanted",
            f"{value.__name__}(...)",
        )  # fmt: skip
    if isinstance(value, FunctionType):
        raise ConfigError(
            f"{key} = {literal(value)} cannot be used", "it is a function, and what it returns is wanted",
            f"{value.__name__}()" if value.__name__.isidentifier() else "a call of it",
        )  # fmt: skip
    if "__len__ __getitem__" in member.objects and hasattr(value, "dataset") and hasattr(value, "batch_size"):
        raise ConfigError(
            f"{key} = {literal(value)} cannot be used",
            "it makes batches by itself; a run makes them of single samples, in an order that follows from task.seed",
            f'its data set, loader.dataset, and task.global_batch = "{value.batch_size} samples"; '
            "its collate function becomes the data set's: dataset.collate = pad",
        )
    if "__len__ __getitem__" in member.objects and _gives_in_turn(value):
        raise ConfigError(
            f"{key} = {literal(value)} cannot be used",
            f"it is {kind_of(value)}, which gives samples one after the other; the order of samples, a resume and "
            "other devices need any of them by its number",
            f"{not_streamed(value)}list(...) of it where that fits into memory, or its samples written as JSONL or "
            "Parquet",
        )
    if "__len__ __getitem__" in member.objects and isinstance(value, Mapping):
        raise ConfigError(
            f"{key} = {_named(value)} cannot be used",
            f"it is {kind_of(value)}, whose entries have names, and samples are taken by their number",
            f"the data set itself, {_an_entry(value)}or a pair of them (train, validation)",
        )
    also = [f"text, {member.cls.__name__}(...)"] if isinstance(member, ShapedTable) else ["text"]
    if isinstance(member, Option) and member.kind == "object":
        also = []
    wanted = ", or ".join(dict.fromkeys([*also, *member.objects.values()]))
    raise ConfigError(f"{key} = {literal(value)} cannot be used", f"it is {kind_of(value)}", wanted)


def _gives_in_turn(value: object) -> bool:
    """Return whether an object gives what it holds in turn alone: torch's IterableDataset, a generator.

    So does the stream of the package `datasets`, which reads columns by their names and has no length.
    """
    reads = reads_by_number(value) or hasattr(value, "__getitems__")
    return hasattr(value, "__iter__") and not (reads and hasattr(value, "__len__"))


def not_streamed(value: object) -> str:
    """Return how else to load a stream of the package `datasets`, as the first of what to try; "" of other objects."""
    of_datasets = type(value).__module__.partition(".")[0] == "datasets"
    return "load_dataset(...) without streaming; or " if of_datasets else ""


def _named(value: Mapping[Any, Any]) -> str:
    """Return a dict as an error shows it: by its names alone where its entries take several lines."""
    told = literal(value)
    return told if "\n" not in told else f"{type(value).__name__} of {', '.join(map(str, value))}"


def _an_entry(value: Mapping[Any, Any]) -> str:
    name = next(iter(value), None)
    return f"such as data[{name!r}], " if isinstance(name, str) else ""


def _text_or_object(option: Option, key: str, value: object) -> object:
    """Return an item of a list of names: a text, or what Python may put in the place of one."""
    return value if isinstance(value, str) else _object(option, key, value)


def _as_in_a_file(option: Option, value: object) -> object:
    """Return a value of Python as a file would hold it; what no file can hold stays as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if option.kind in ("whole", "bytes") and not isinstance(value, bool | str | float):
        return _as_index(value)
    if option.kind == "number" and isinstance(value, numbers.Real) and not isinstance(value, bool | int):
        return float(value)
    if option.kind == "texts" and isinstance(value, list | tuple):
        return [os.fspath(each) if isinstance(each, os.PathLike) else each for each in value]
    return plain(option, value) if option.kind == "amount" and isinstance(value, Amount) else value


def _as_index(value: Any) -> object:
    """Return a whole number of any kind (numpy's, torch's) as Python's."""
    try:
        return operator.index(value)
    except TypeError:
        return value
