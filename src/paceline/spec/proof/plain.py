"""Records of a proof as plain data, and back: between processes, and where proofs are remembered."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

Made = TypeVar("Made")


def from_plain(kind: type[Made], data: Mapping[str, object]) -> Made:
    """Return the record that `dataclasses.asdict` took apart.

    Raises KeyError for a field that is lacking, TypeError for one that the record does not have.
    """
    hints = typing.get_type_hints(kind)
    if unknown := data.keys() - hints.keys():
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**{name: _value(hints[name], data[name]) for name in hints})


def _value(hint: Any, value: Any) -> object:
    if value is None:
        return None
    if isinstance(hint, types.UnionType):
        (hint,) = (each for each in hint.__args__ if each is not types.NoneType)
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast("type[Any]", hint), value)
    if typing.get_origin(hint) is tuple:
        return tuple(_value(hint.__args__[0], each) for each in value)
    return value
