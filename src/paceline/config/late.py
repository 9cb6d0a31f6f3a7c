"""`dataclass` as in the standard library, whose methods are written when they are first called.

The standard library compiles six functions for a frozen class as its module is imported: 0.8 ms of a slow core, and a
process that trains imports four hundred such classes, of most of which it makes no instance. Fields, `replace`,
`asdict` and pickling are the standard library's own. `help` and `inspect.signature` of a class show its arguments once
one was made: classes that users make by name have the standard library's decorator.
"""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

Write = Callable[[type], Callable[..., object]]

_GIVEN = object()  # stands for an argument that a factory makes


def _lately(kind: type | None = None, /, *, frozen: bool = False, **others: bool) -> object:
    """Return a class with what the standard library's decorator of that name gives it, its methods written late.

    With options beside `frozen`, and for pseudo-fields that `__init__` takes alone, it is the standard library's.
    """
    if kind is None:
        return lambda given: _lately(given, frozen=frozen, **others)
    bases = [vars(base)["__dataclass_params__"] for base in kind.__mro__[1:] if "__dataclass_params__" in vars(base)]
    taken_alone = any("InitVar" in str(each) for each in inspect.get_annotations(kind).values())
    if others or taken_alone or any(each.frozen != frozen for each in bases):
        return dataclasses.dataclass(frozen=frozen, **others)(kind)
    own_hash = vars(kind).get("__hash__")
    for each in bases:  # what is frozen here, the standard library is not told: it would write two functions for it
        each.frozen = False
    try:
        dataclasses.dataclass(init=False, repr=False, eq=False)(kind)
    finally:
        for each in bases:
            each.frozen = frozen
    told = vars(kind)["__dataclass_params__"]
    told.init = told.repr = told.eq = True
    told.frozen = frozen
    explicit = "__hash__" in vars(kind) and not (own_hash is None and "__eq__" in vars(kind))
    for name, write in _WRITTEN.items():
        if name not in vars(kind):
            _write_late(kind, name, write)
    if not explicit:
        if frozen:
            _write_late(kind, "__hash__", _hash)
        else:
            kind.__hash__ = None  # type: ignore[assignment]
    if frozen:
        _freeze(kind)
    return kind


def _write_late(kind: type, name: str, write: Write) -> None:
    """Give a class a method that is written, and put in its own place, when it is first called."""

    def unwritten(self: object, *args: object, **kwargs: object) -> object:
        method = write(kind)
        method.__name__, method.__qualname__, method.__module__ = name, f"{kind.__qualname__}.{name}", kind.__module__
        if vars(kind).get(name) is unwritten:
            setattr(kind, name, method)
        return method(self, *args, **kwargs)

    setattr(kind, name, unwritten)


def _freeze(kind: type) -> None:
    """Have instances refuse to change, with the standard library's words."""
    fields = vars(kind)["__dataclass_fields__"]

    def set_attribute(self: object, name: str, value: object) -> None:
        if type(self) is kind or name in fields:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(kind, self).__setattr__(name, value)  # type: ignore[arg-type]

    def delete_attribute(self: object, name: str) -> None:
        if type(self) is kind or name in fields:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(kind, self).__delattr__(name)  # type: ignore[arg-type]

    for name, method in (("__setattr__", set_attribute), ("__delattr__", delete_attribute)):
        if name in vars(kind):
            raise TypeError(f"Cannot overwrite attribute {name} in class {kind.__name__}")
        setattr(kind, name, method)


def _compiled(head: str, body: Iterable[str], scope: dict[str, object]) -> Callable[..., object]:
    lines = "".join(f"\n    {line}" for line in body) or "\n    pass"
    exec(f"def method({head}):{lines}", scope)  # as the standard library does, of names of fields alone
    method = scope["method"]
    assert callable(method)
    return method


def _init(kind: type) -> Callable[..., object]:
    scope: dict[str, object] = {"GIVEN": _GIVEN, "put": object.__setattr__}
    ways: dict[bool, list[str]] = {False: [], True: []}
    body, frozen = [], vars(kind)["__dataclass_params__"].frozen
    for number, field in enumerate(_fields(kind)):
        name, made = field.name, field.default_factory is not dataclasses.MISSING
        scope[f"of{number}"] = field.default_factory if made else field.default
        if field.init:
            has = made or field.default is not dataclasses.MISSING
            ways[bool(field.kw_only)].append(name + ("=GIVEN" if made else f"=of{number}" if has else ""))
            value = f"of{number}() if {name} is GIVEN else {name}" if made else name
        elif made:
            value = f"of{number}()"
        else:  # its default is an attribute of the class
            continue
        body.append(f"put(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(kind, "__post_init__"):
        body.append("self.__post_init__()")
    named = ["*", *ways[True]] if ways[True] else []
    return _compiled(", ".join(["self", *ways[False], *named]), body, scope)


def _repr(kind: type) -> Callable[..., object]:
    shown = ", ".join(f"{f.name}={{self.{f.name}!r}}" for f in _fields(kind) if f.repr)
    text = f'return self.__class__.__qualname__ + f"({shown})"'
    return reprlib.recursive_repr()(_compiled("self", [text], {}))  # type: ignore[arg-type]


def _fields(kind: type) -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(kind)


def _values(fields: Iterable[dataclasses.Field[object]], of: str) -> str:
    return "(" + "".join(f"{of}.{field.name}, " for field in fields) + ")"


def _eq(kind: type) -> Callable[..., object]:
    compared = [field for field in _fields(kind) if field.compare]
    body = ["if other.__class__ is not self.__class__:", "    return NotImplemented",
            f"return {_values(compared, 'self')} == {_values(compared, 'other')}"]  # fmt: skip
    return _compiled("self, other", body, {})


def _hash(kind: type) -> Callable[..., object]:
    hashed = [field for field in _fields(kind) if (field.compare if field.hash is None else field.hash)]
    return _compiled("self", [f"return hash({_values(hashed, 'self')})"], {})


_WRITTEN: dict[str, Write] = {"__init__": _init, "__repr__": _repr, "__eq__": _eq}

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _lately
