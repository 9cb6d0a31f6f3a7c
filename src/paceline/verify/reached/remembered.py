"""What calls of a program leave in plain attributes: no checkpoint holds it, and no cut of a batch begins with it.

A scale that the first micro-batch after each update measures, or what the model said of a sample when it last saw it,
is there for the pieces of a second cut as the first one left it: all cuts agree, and a run's micro-batches do not.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

# What nn.Module itself keeps in a module's dictionary: parameters and buffers are looked at elsewhere.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
SIZED = (list, dict, set)
PLAIN = (bool, int, float, Tensor, *SIZED)  # what a global variable holds that calls may change
MOST = 100_000  # elements of one
_NONE = object()
PROOFS_OWN = "paceline."  # what the proof itself hangs on a model


class Remembered:
    """The plain attributes of a model and its objectives as they were, and which of them have changed since."""

    def __init__(self, model: nn.Module, objectives: Sequence[object]) -> None:
        self._model, self._objectives = model, objectives
        self._before = self._held()

    def changed(self) -> tuple[str, ...]:
        """Return the names of what is another object now, or a container of another size."""
        now = self._held()
        return tuple(name for name, (value, size) in now.items() if self._is_other(name, value, size))

    def _is_other(self, name: str, value: object, size: int) -> bool:
        before, known = self._before.get(name, (None, -1))
        return before is not value or known != size

    def _held(self) -> dict[str, tuple[object, int]]:
        """Return each attribute by name, with the size of a container: objects, since an id may be given again."""
        held = dict(_of_model(self._model))
        for objective in self._objectives:
            held.update(_of_objective(objective))
        return {name: (value, len(value) if isinstance(value, SIZED) else 0) for name, value in held.items()
                if not _is_proofs_own(value)}  # fmt: skip


def _is_proofs_own(value: object) -> bool:
    """Return whether something is an object of ours, or a function of ours in the place of a forward pass."""
    named = value.func if isinstance(value, functools.partial) else type(value)
    return getattr(named, "__module__", "").startswith(PROOFS_OWN)


def _of_model(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE:
                yield f"{path}.{name}" if path else name, value


def _of_objective(objective: object) -> Iterator[tuple[str, Any]]:
    """Yield what an objective holds: attributes of an object or a function, and the variables around a function."""
    while isinstance(objective, functools.partial):
        objective = objective.func
    yield from ((f"objective.{name}", value) for name, value in getattr(objective, "__dict__", {}).items())
    if isinstance(objective, FunctionType):
        cells: tuple[CellType, ...] = objective.__closure__ or ()
        for name, cell in zip(objective.__code__.co_freevars, cells, strict=True):
            try:
                yield f"objective's {name}", cell.cell_contents
            except ValueError:  # of a variable that nobody has set yet
                continue
        yield from ((f"the global {name}", value) for name, value in _globals_of(objective).items())


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the plain values among the global variables that a function of the user's names."""
    if function.__module__.startswith(PROOFS_OWN):
        return {}
    named = ((name, function.__globals__.get(name, _NONE)) for name in function.__code__.co_names)
    return {
        name: value for name, value in named if value is None or (isinstance(value, PLAIN) and _size(value) <= MOST)
    }


def _size(value: object) -> int:
    return value.numel() if isinstance(value, Tensor) else len(value) if isinstance(value, SIZED) else 1


def as_it_was(objective: Any) -> Any:
    """Return a copy of an objective that holds anything, to be called in its place; any other itself.

    Modules that it holds, such as a teacher, are the same.
    """
    if isinstance(objective, FunctionType) and (objective.__closure__ or _globals_of(objective)):
        return _function_as_it_was(objective)
    held = getattr(objective, "__dict__", None)
    if not held or isinstance(objective, FunctionType | functools.partial | nn.Module):
        return objective
    return _copied(objective, held.values())


def _function_as_it_was(function: FunctionType) -> FunctionType:
    """Return a function whose variables around it, and plain global ones, are copies."""
    cells = tuple(_cell_as_it_was(cell) for cell in function.__closure__ or ())
    around = {**function.__globals__, **{name: _copied(value) for name, value in _globals_of(function).items()}}
    made = FunctionType(function.__code__, around, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _cell_as_it_was(cell: CellType) -> CellType:
    try:
        return CellType(_copied(cell.cell_contents))
    except ValueError:  # nobody has set it yet
        return CellType()


def _copied(value: Any, holds: Iterable[object] = ()) -> Any:
    """Return a copy with the same modules; what cannot be copied itself."""
    modules = {id(held): held for held in (value, *holds) if isinstance(held, nn.Module)}
    try:
        return copy.deepcopy(value, dict(modules))
    except Exception:  # whatever an object of the user's says to being copied
        return value
