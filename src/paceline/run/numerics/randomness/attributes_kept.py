"""What a pass leaves in plain attributes, put back after it: looks at a program must not be calls of it.

A layer that measures its scale at its first call, and says so in a flag, would have measured that on the rows of a
look, whose weights are put back: in training it never would. A counter of calls would begin at two or more.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.task.own_code import is_installed

# What nn.Module itself keeps in a module's dictionary: parameters and buffers are put back elsewhere.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
FILLED = (list, dict, set, deque, defaultdict, OrderedDict, Counter)  # exactly these are filled again in place
MOST = 100_000  # elements of one, and of all that is looked at
OURS, STDLIB = "paceline", Path(sysconfig.get_path("stdlib"))


class AttributesKept:
    """What modules and an objective hold beside weights and buffers, as it was: the same objects, filled as before.

    Containers, objects of the user's own classes and modules that no module has registered are looked into, however
    deep. `tensors` are those that were found, of which a pass may write into any.
    """

    def __init__(self, model: nn.Module, objective: object = None) -> None:
        self.tensors: list[Tensor] = []
        self._back: list[Callable[[], None]] = []
        self._seen: dict[int, object] = {}  # the objects too, since an id may be given again
        for module in model.modules():
            self._note_module(module)
        self._note_callable(objective)

    def restore(self) -> None:
        """Put all of it back."""
        for back in self._back:
            back()

    def _note(self, value: object) -> None:
        """Look into what something holds."""
        if id(value) in self._seen or len(self._seen) > MOST:
            return
        if isinstance(value, Tensor):
            self._seen[id(value)] = value
            if not (isinstance(value, nn.Parameter) or value.is_inference()):
                self.tensors.append(value)
        elif isinstance(value, nn.Module):
            self._note_other_model(value)
        elif type(value) in FILLED:
            self._note_container(value)
        elif isinstance(value, tuple):
            self._seen[id(value)] = value
            for each in value:
                self._note(each)
        elif isinstance(value, SimpleNamespace) or _is_of_users_class(value):
            self._seen[id(value)] = value
            self._note_table(vars(value))

    def _note_container(self, value: Any) -> None:
        if len(value) > MOST:
            return
        self._seen[id(value)] = value
        content = value.copy()
        self._back.append(lambda: _fill(value, content))
        for each in list(content.values() if isinstance(content, dict) else content):
            self._note(each)

    def _note_table(self, table: dict[str, Any], but: Callable[[str], bool] = lambda name: False) -> None:
        was = dict(table)

        def back() -> None:
            for name in [name for name in table if name not in was and not but(name)]:
                del table[name]
            for name, value in was.items():
                if not but(name) and table.get(name, table) is not value:
                    table[name] = value

        self._back.append(back)
        for name, value in was.items():
            if not but(name):
                self._note(value)

    def _note_module(self, module: nn.Module) -> None:
        self._seen[id(module)] = module
        kind = type(module)

        def is_elsewhere(name: str) -> bool:  # a lazy module becomes another one
            registered = (module._parameters, module._buffers, module._modules)
            return name in OF_EVERY_MODULE or type(module) is not kind or any(name in each for each in registered)

        if not isinstance(module, torch.jit.ScriptModule):
            self._note_table(vars(module), is_elsewhere)

    def _note_other_model(self, model: nn.Module) -> None:
        """Look into a model that no module of the program's has registered, such as a teacher in a list."""
        for module in model.modules():
            if id(module) not in self._seen:
                self._note_module(module)
                own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                self.tensors += [each for each in own if not each.is_inference()]

    def _note_callable(self, called: object) -> None:
        """Look into what a function, a method or an object that is called holds; nothing of ours but what it calls."""
        if called is None or id(called) in self._seen:
            return
        if isinstance(called, functools.partial):
            self._seen[id(called)] = called
            for each in (called.func, *called.args, *called.keywords.values()):
                self._note_callable(each)
        elif isinstance(called, MethodType):
            self._note_callable(called.__func__)
            self._note(called.__self__)
        elif isinstance(called, FunctionType):
            self._seen[id(called)] = called
            self._note_function(called)
        else:
            self._note(called)

    def _note_function(self, function: FunctionType) -> None:
        cells: tuple[CellType, ...] = function.__closure__ or ()
        for cell in cells:
            with contextlib.suppress(ValueError):  # of a variable that nobody has set yet
                self._note_cell(cell, cell.cell_contents)
        if _is_ours(function.__module__):
            return
        self._note_table(vars(function))
        named = set(function.__code__.co_names)
        around = function.__globals__
        plain = {n for n in named & around.keys() if _is_plain(around[n]) or _is_of_users_class(around[n])}
        self._note_table(around, lambda name: name not in plain)

    def _note_cell(self, cell: CellType, was: object) -> None:
        def back() -> None:
            cell.cell_contents = was

        self._back.append(back)
        self._note_callable(was)


@contextlib.contextmanager
def attributes_kept(model: nn.Module, objective: object = None) -> Iterator[AttributesKept]:
    """Put back at the end of the block what passes leave in a model and an objective beside weights and buffers."""
    kept = AttributesKept(model, objective)
    try:
        yield kept
    finally:
        kept.restore()


def _fill(value: Any, content: Any) -> None:
    """Give a container the elements that it had, where it has others."""
    ours, theirs = (list(each.items() if isinstance(each, dict) else each) for each in (value, content))
    same = len(ours) == len(theirs) and all(_is_same(one, other) for one, other in zip(ours, theirs, strict=True))
    if same:
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(content)
    else:
        value.update(content)


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):  # an item of a dictionary
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | Tensor) or type(value) in FILLED


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == OURS


def _is_of_users_class(value: object) -> bool:
    """Return whether something is an object, with attributes, of a class that is in code of the user's own."""
    kind = type(value)
    if isinstance(value, type | nn.Module) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return _is_users(kind.__module__)


@functools.cache
def _is_users(module: str) -> bool:
    if module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or _is_ours(module):
        return False
    path = Path(file).resolve()
    return not (is_installed(path) or path.is_relative_to(STDLIB))
