"""Containers that a unit is given: what it changes in a list, a dictionary or a dataclass, its caller sees.

Casts and FSDP2 hand a unit copies of the containers among its inputs, and recompute would hand it those that later
blocks have changed. A block that appends to a list, or a model that adds to its batch, would do so in a copy, and what
it has left there (an auxiliary loss, say) would be lost without a word.

FSDP2's casts make a plain dictionary of any other one and pass over packed sequences and deques. Units get them in the
classes that their callers gave them in, and cast.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from paceline.run.numerics.precision import cast_floats, refilled
from paceline.task.models.layers.batch_norm import is_recomputed

Entries = dict[object, object]


def keep_changes(units: Iterable[nn.Module], cast_to: torch.dtype | None = None) -> list[GivenContainers]:
    """Have units work on containers of their own; `listen` of each is called once all else wraps the units.

    `cast_to` is the dtype that a unit's inputs are cast to, None where they are not.
    """
    return [GivenContainers(unit, cast_to) for unit in dict.fromkeys(units)]


@dataclass
class _Call:
    """One call of a unit: its caller's containers, and what the unit's own held before it ran, and hold after it."""

    handed: tuple[tuple[object, ...], dict[str, object]]  # the arguments, before anything casts them
    callers: list[object]
    is_running: bool = False  # whether the unit's forward has begun with it
    before: list[Entries] = field(default_factory=list)
    own: list[object] = field(default_factory=list)


class GivenContainers:
    """The containers among one unit's inputs, on both sides of what copies them."""

    def __init__(self, unit: nn.Module, cast_to: torch.dtype | None = None) -> None:
        self._unit, self._forward, self._cast_to = unit, unit.forward, cast_to
        self._calls: list[_Call] = []  # a unit may call itself
        unit.forward = self._with_its_own

    def listen(self) -> None:
        """Hear of calls before FSDP2's hooks do, and give a caller what has changed."""
        if self._cast_to is not None:
            self._unit.forward = functools.partial(self._in_given_classes, self._unit.forward)
        self._unit.register_forward_pre_hook(self._begins, prepend=True, with_kwargs=True)
        self._unit.register_forward_hook(self._ends, always_call=True)

    def _begins(
        self, unit: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Note a caller's containers, and hand on others: what is recomputed must not see what comes later."""
        callers = list(_containers([*args, *kwargs.values()]))
        handed = _each_copied(args, kwargs) if callers else (args, kwargs)
        self._calls.append(_Call(handed, callers))
        return handed if callers else None

    def _in_given_classes(self, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Run the unit, a repetition of it later too, on inputs of the classes that they had before casts."""
        call = self._calls[-1] if self._calls and not self._calls[-1].is_running else None
        if call is not None:
            assert self._cast_to is not None
            first, named = call.handed
            args = tuple(_as_given(args, first, self._cast_to)) if len(args) == len(first) else args
            kwargs = {k: _as_given(v, named[k], self._cast_to) if k in named else v for k, v in kwargs.items()}
        return forward(*args, **kwargs)

    def _with_its_own(self, *args: object, **kwargs: object) -> object:
        given = list(_containers([*args, *kwargs.values()]))
        call = self._calls[-1] if self._calls and not self._calls[-1].is_running else None
        if call is not None:
            call.is_running = True
        if not given:
            return self._forward(*args, **kwargs)
        args, kwargs = _each_copied(args, kwargs)
        own = list(_containers([*args, *kwargs.values()]))
        before = list(map(_entries, own))
        outputs = self._forward(*args, **kwargs)
        if call is not None:
            call.before, call.own = before, own
        elif not is_recomputed():  # a program has called `forward` itself, and no hook hears of its end
            _give_all_back(given, before, own)
        return outputs

    def _ends(self, unit: nn.Module, inputs: object, outputs: object) -> None:
        call = self._calls.pop()
        if len(call.callers) == len(call.own):  # else a hook of the program's own has given it others
            _give_all_back(call.callers, call.before, call.own)


def _each_copied(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
    return tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()}


def _containers(values: Iterable[object], around: frozenset[int] = frozenset()) -> Iterator[object]:
    """Yield the containers among values that a program can change, and those within them, but for those `around`."""
    for value in values:
        if _is_container(value) and id(value) not in around:
            yield value
            yield from _containers(_entries(value).values(), around | {id(value)})
        elif isinstance(value, tuple):
            yield from _containers(value, around)


def _is_container(value: object) -> bool:
    if type(value) in (list, deque, OrderedDict) or (isinstance(value, dict) and not isinstance(value, OrderedDict)):
        return True
    return is_dataclass(value) and not isinstance(value, type | dict)


def _as_given(value: Any, was: Any, dtype: torch.dtype) -> Any:
    """Return an input in the class that it was given in, and cast to `dtype` where the casts have passed over it."""
    if isinstance(was, PackedSequence | deque):
        return cast_floats(value, dtype)
    if isinstance(was, dict) and isinstance(value, dict) and not is_dataclass(was) and value.keys() == was.keys():
        entries = {key: _as_given(entry, was[key], dtype) for key, entry in value.items()}
        is_same = type(value) is type(was) and all(entries[key] is value[key] for key in entries)
        return value if is_same else refilled(was, entries)
    if isinstance(was, list | tuple) and type(value) is type(was) and len(value) == len(was):
        found = [_as_given(entry, then, dtype) for entry, then in zip(value, was, strict=True)]
        if all(one is other for one, other in zip(found, value, strict=True)):
            return value
        kind: Any = type(value)
        return kind(*found) if hasattr(value, "_fields") else kind(found)
    return value


def _entries(container: Any) -> Entries:
    if isinstance(container, list | deque):
        return dict(enumerate(container))
    if isinstance(container, dict):
        return dict(container)
    return {one.name: getattr(container, one.name) for one in fields(container) if hasattr(container, one.name)}


def _copied(value: object, around: Mapping[int, object] = MappingProxyType({})) -> object:
    """Return the same value with containers of its own; what they hold, such as tensors, is the same.

    `around` are copies of the containers that it lies in: one that holds itself is met again.
    """
    if _is_container(value):
        if id(value) in around:
            return around[id(value)]
        own = copy.copy(value)
        for key, entry in _entries(value).items():
            if (other := _copied(entry, {**around, id(value): own})) is not entry:
                _put(own, key, other)
        return own
    if isinstance(value, tuple):
        entries = [_copied(entry, around) for entry in value]
        if all(one is other for one, other in zip(entries, value, strict=True)):
            return value
        kind: Any = type(value)
        return kind(*entries) if hasattr(value, "_fields") else kind(entries)
    return value


def _put(container: Any, key: Any, value: object) -> None:
    if isinstance(container, list | deque | dict):
        container[key] = value
    else:
        object.__setattr__(container, key, value)


def _give_all_back(callers: Iterable[object], before: Iterable[Entries], own: Iterable[object]) -> None:
    for caller, then, now in zip(callers, before, own, strict=True):
        _give_back(caller, then, _entries(now))


def _give_back(caller: Any, before: Entries, after: Entries) -> None:
    """Change the caller's container as a unit has changed its own; entries that it left alone stay the caller's."""
    if list(before) == list(after) and all(before[key] is after[key] for key in after):
        return
    held = _entries(caller)
    known = {id(value): held[key] for key, value in before.items() if key in held}
    entries = {key: known.get(id(value), value) for key, value in after.items()}
    if isinstance(caller, list | deque):
        caller.clear()
        caller.extend(entries.values())
    elif isinstance(caller, dict):
        caller.clear()
        caller.update(entries)
    else:
        for key, value in entries.items():
            if before.get(key, caller) is not after[key]:
                _put(caller, key, value)
