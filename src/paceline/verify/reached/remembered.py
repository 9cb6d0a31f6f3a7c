"""What calls of a program leave in plain attributes: no checkpoint holds it, and no cut of a batch begins with it.

A scale that the first micro-batch after each update measures, or what the model said of a sample when it last saw it,
is there for the pieces of a second cut as the first one left it: all cuts agree, and a run's micro-batches do not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from paceline.run.numerics.randomness.attributes_kept import FILLED, OF_EVERY_MODULE

SIZED = (list, dict, set, deque)
PLAIN = (bool, int, float, Tensor, *SIZED)  # what variables hold that calls may change
MOST = 100_000  # elements of one
_NONE = object()  # what a place holds in which nothing is
PROOFS_OWN = "paceline."  # what the proof itself hangs on a model
_Mark = tuple[object, ...]


class Remembered:
    """The plain attributes of a model and its objectives as they were, and which of them have changed since."""

    def __init__(self, model: nn.Module, objectives: Sequence[object]) -> None:
        self._model, self._objectives = model, objectives
        self._before = self._held()

    def changed(self) -> tuple[str, ...]:
        """Return the names of what is another object now, or holds others."""
        return tuple(name for name, mark in self._held().items() if not _alike(mark, self._before.get(name, ())))

    def _held(self) -> dict[str, _Mark]:
        """Return each attribute by name, with what it holds: objects, since an id may be given again."""
        held = dict(_of_model(self._model))
        for objective in self._objectives:
            held.update((place.name, place.read()) for place in _places_of(objective))
        return {name: _mark(value) for name, value in held.items() if not _is_proofs_own(value)}


def _is_proofs_own(value: object) -> bool:
    """Return whether something is an object of ours, or a function of ours in the place of a forward pass."""
    named = value.func if isinstance(value, functools.partial) else type(value)
    return getattr(named, "__module__", "").startswith(PROOFS_OWN)


def _mark(value: object) -> _Mark:
    """Return an object and what it holds: elements of a container, how often a tensor was written, attributes."""
    if isinstance(value, Tensor):
        return value, value._version if not value.is_inference() else None
    if isinstance(value, SIZED):
        parts = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
        return (value, *parts) if len(parts) <= MOST else (value, len(parts))
    if isinstance(value, nn.Module | type | FunctionType):
        return (value,)
    return (value, *getattr(value, "__dict__", {}).values())


def _alike(one: _Mark, other: _Mark) -> bool:
    """Return whether two marks are of the same objects; numbers and names that are equal are the same."""
    return len(one) == len(other) and all(
        a is b or (isinstance(a, int | str) and type(a) is type(b) and a == b) for a, b in zip(one, other, strict=True)
    )


def _of_model(model: nn.Module) -> Iterator[tuple[str, object]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE:
                yield f"{path}.{name}" if path else name, value


@dataclass(frozen=True)
class _HeldAt:
    """Where an objective holds something: under a key of a dictionary, or in a cell of a variable around it."""

    name: str
    where: dict[str, object] | CellType
    key: str = ""

    def read(self) -> object:
        if isinstance(self.where, dict):
            return self.where.get(self.key, _NONE)
        try:
            return self.where.cell_contents
        except ValueError:  # of a variable that nobody has set yet
            return _NONE

    def write(self, value: object) -> None:
        if isinstance(self.where, dict):
            self.where[self.key] = value
        elif value is not _NONE:
            self.where.cell_contents = value
        else:
            del self.where.cell_contents


def _places_of(objective: object) -> list[_HeldAt]:
    """Return where an objective holds anything: attributes, variables around a function, global ones that it names.

    Of the object that a method is of, which may be a whole program, these are its plain attributes.
    """
    is_method, objective = _is_method(objective), _itself(objective)
    hidden = OF_EVERY_MODULE if isinstance(objective, nn.Module) else ()
    places = [
        _HeldAt(f"objective.{name}", table, name)
        for table in _tables_of(objective)
        for name, value in table.items()
        if name not in hidden and (_is_plain(value) or not is_method)
    ]
    if isinstance(objective, FunctionType):
        cells: tuple[CellType, ...] = objective.__closure__ or ()
        around = zip(objective.__code__.co_freevars, cells, strict=True)
        places += [_HeldAt(f"objective's {name}", cell) for name, cell in around]
        places += [_HeldAt(f"the global {name}", objective.__globals__, name) for name in _globals_of(objective)]
    return places


def _is_method(objective: object) -> bool:
    while isinstance(objective, functools.partial):
        objective = objective.func
    return isinstance(objective, MethodType)


def _itself(objective: object) -> object:
    """Return the function or the object that holds what an objective knows."""
    while isinstance(objective, functools.partial | MethodType):
        objective = objective.func if isinstance(objective, functools.partial) else objective.__self__
    return objective


def _tables_of(objective: object) -> list[dict[str, object]]:
    table = getattr(objective, "__dict__", None)
    return [table] if isinstance(table, dict) else []  # a class shows its own through a proxy


def _globals_of(function: FunctionType) -> list[str]:
    """Return the names of the global variables with plain values that a function of the user's names."""
    if (function.__module__ or "").startswith(PROOFS_OWN):
        return []
    named = ((name, function.__globals__.get(name, _NONE)) for name in dict.fromkeys(function.__code__.co_names))
    return [name for name, value in named if _is_plain(value)]


def _is_plain(value: object) -> bool:
    return value is None or (isinstance(value, PLAIN) and _size(value) <= MOST)


def _size(value: object) -> int:
    return value.numel() if isinstance(value, Tensor) else len(value) if isinstance(value, SIZED) else 1


class AsItWas:
    """What an objective holds, as it was: for a while it can be so again.

    The objective itself stays, and so do containers: hooks and other functions that write what it reads go on doing so.
    Modules that it holds, such as a teacher, are the same, and an objective that is a module is left alone.
    """

    def __init__(self, objective: object) -> None:
        own = _itself(objective)
        is_module = isinstance(own, nn.Module)
        self._tables = [] if is_module else [(table, frozenset(table)) for table in _tables_of(own)]
        held = [(place, place.read()) for place in ([] if is_module else _places_of(objective))]
        self._was = [(place, value, _copied(value)) for place, value in held]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Have the objective hold what it held, and after that what it holds now."""
        tables = [(table, dict(table)) for table, _ in self._tables]
        now = [(place, value, _content(value)) for place, value in [(one, one.read()) for one, *_ in self._was]]
        held = [(value, _content(value)) for _, value, _ in self._was]
        try:
            for table, names in self._tables:
                for name in table.keys() - names:
                    del table[name]
            for place, value, was in self._was:
                place.write(_filled(value, _copied(was)))
            yield
        finally:
            for value, content in held:
                _filled(value, content)
            for table, content in tables:
                table.clear()
                table.update(content)
            for place, value, content in now:
                place.write(_filled(value, content))


def _content(value: object) -> object:
    """Return a container's elements, apart from it; of anything else itself."""
    return copy.copy(value) if type(value) in FILLED else value


def _filled(value: Any, content: Any) -> Any:
    """Return a container with these elements in the place of its own; of anything else `content`."""
    if value is content or type(value) not in FILLED:
        return content
    value.clear()
    if isinstance(value, list | deque):
        value.extend(content)
    else:
        value.update(content)
    return value


def _copied(value: object) -> object:
    """Return a copy with the same modules; of what cannot be copied a container of the same elements, or itself.

    Large tables that an objective reads, such as features of all samples, are themselves: a copy might not fit.
    """
    if value is _NONE or (isinstance(value, PLAIN) and _size(value) > MOST):
        return value
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    modules = {id(each): each for each in (value, *held) if isinstance(each, nn.Module)}
    try:
        return copy.deepcopy(value, dict(modules))
    except Exception:  # whatever an object of the user's says to being copied
        return _content(value)
