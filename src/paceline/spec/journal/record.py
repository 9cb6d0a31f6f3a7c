"""What every journal record has in common: how it is declared, written as plain data and read back.

A kind of record is a frozen dataclass, most of them below `records/`, whose fields are annotated with what is `Told` of
them. There is no other declaration: the writer builds such records, `parse` makes them of lines, and the journal's page
tells the fields.
"""

from __future__ import annotations

import dataclasses
import math
import time
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

SCHEMA = 1
Table = Mapping[str, Any]  # a JSON object that is declared elsewhere: a spec, a plan, a forecast
Numbers = Mapping[str, float]
Words = tuple[str, ...]
Tables = tuple[Table, ...]
Ids = tuple[int, ...]
Some = TypeVar("Some", bound="Record")
EXACT = 2**53  # up to here every whole number is a float
LATEST = 253_370_764_800.0  # the first day of the year 9999, by UTC
MOMENTS = ("began", "goes_on")  # further fields that are moments, of all kinds of records


@dataclass(frozen=True)
class Told:
    """What the page of the journal tells of a field: its meaning and its unit.

    `key` is its name in the journal where Python has another use for that word. A field that is there only `if_any` is
    left out of the record where it is None.
    """

    meaning: str
    unit: str = ""
    key: str = ""
    if_any: bool = False


@dataclass(frozen=True)
class Record:
    """One line of a journal. `time` is in seconds since the epoch, `attempt` the number of the start that wrote it."""

    KIND: ClassVar[str]

    time: float | None = field(default_factory=lambda: time.time(), kw_only=True)
    attempt: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Field:
    """A field of a kind of record: its names in Python and in the journal, its type and what is told of it.

    `reader` makes a value of that type of what a journal holds.
    """

    name: str
    key: str
    type: Any
    told: Told
    reader: Callable[[Any], Any]


_KNOWN: dict[type[Record], tuple[Field, ...]] = {}


def fields_of(kind: type[Record]) -> tuple[Field, ...]:
    """Return the fields that a kind of record has of its own, in order."""
    if kind not in _KNOWN:
        hints = typing.get_type_hints(kind, include_extras=True)
        told = {name: (hint.__origin__, *hint.__metadata__) for name, hint in hints.items() if _is_told(hint)}
        _KNOWN[kind] = tuple(
            Field(name, each.key or name, hint, each, READERS[hint]) for name, (hint, each) in told.items()
        )
    return _KNOWN[kind]


def _is_told(hint: object) -> bool:
    return isinstance(next(iter(getattr(hint, "__metadata__", ())), None), Told)


def plain(record: Record) -> dict[str, object]:
    """Return a record as a line of the journal says it: readable data, in the order of the declaration."""
    number_of_start = {} if record.attempt is None else {"attempt": record.attempt}
    return {"schema": SCHEMA, "kind": record.KIND, "time": record.time, **number_of_start, **own_fields(record)}


def own_fields(record: Record) -> dict[str, object]:
    """Return what a record has beyond what all have in common, by its names in the journal."""
    values = ((each, getattr(record, each.name)) for each in fields_of(type(record)))
    return {each.key: value for each, value in values if value is not None or not each.told.if_any}


def read(kind: type[Some], line: Mapping[str, object]) -> Some:
    """Return a line of the journal as a record of this kind. Raises nothing.

    What the line lacks or holds in another type is None, an empty text or an empty table. Numbers that JSON lacks are
    spelt as text there, and are numbers here.
    """
    values = {each.name: each.reader(line.get(each.key)) for each in fields_of(kind)}
    values |= {name: moment(values[name]) for name in MOMENTS if name in values}
    return kind(**values, time=moment(line.get("time")), attempt=whole(line.get("attempt")))


def now(record: Some) -> Some:
    """Return a record as one that was made now."""
    return dataclasses.replace(record, time=time.time())


def number(value: Any) -> float | None:
    """Return a number, NaN and infinities included; None for anything else."""
    if type(value) is float:  # as nearly all of a long journal are
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float(value) if value in ("nan", "inf", "-inf") else None
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        return None


def moment(value: object) -> float | None:
    """Return seconds since the epoch; None for anything that no calendar has: a damaged line, a clock that is none."""
    known = number(value)
    return known if known is not None and 0.0 <= known <= LATEST else None


def plain_mean(values: Iterable[float]) -> float:
    """Return the mean; infinite where the sum is beyond all numbers, NaN of nothing."""
    known = list(values)
    return sum(known) / len(known) if known else math.nan


def whole(value: object) -> int | None:
    """Return a whole number; None for anything else."""
    if type(value) is int and -EXACT <= value <= EXACT:
        return value
    known = number(value)
    return None if known is None or not math.isfinite(known) else int(known)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _table(value: object) -> Table:
    return value if isinstance(value, dict) else {}


def _numbers(value: object) -> Numbers:
    return {name: known for name, each in _table(value).items() if (known := number(each)) is not None}


def _words(value: object) -> Words:
    return tuple(map(_text, value)) if isinstance(value, list | tuple) else ()


def _ids(value: object) -> Ids | None:
    if not isinstance(value, list | tuple):
        return None
    known = [whole(each) for each in value]
    return None if None in known else tuple(each for each in known if each is not None)


READERS: dict[Any, Callable[[Any], Any]] = {
    float | None: number,
    int | None: whole,
    str: _text,
    str | None: lambda value: None if value is None else str(value),
    bool | None: lambda value: value if isinstance(value, bool) else None,
    Table: _table,
    Table | None: lambda value: value if isinstance(value, dict) else None,
    Numbers: _numbers,
    Words: _words,
    Words | None: lambda value: _words(value) or None,
    Tables: lambda value: tuple(each for each in value if isinstance(each, dict)) if isinstance(value, list) else (),
    Ids | None: _ids,
    Any: lambda value: value,
}
