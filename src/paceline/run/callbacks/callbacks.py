"""Callbacks: objects of the user's whose methods are called at hooks, alike on every rank of every layout.

A hook returns None or what it decides, as a dict: "stop" (a reason: training ends after this step, as complete), "skip"
(a reason, at `before_step`: this step's update is left out), "lr" (at `before_step`: the learning rate of this step)
and "log" (numbers by name, for the journal). After each hook the ranks compare what was decided, and what was written
of weights and optimizer: where one rank did otherwise that is an error. What a callback must keep for a resume it gives
as plain data in `state()` and takes in `load()`.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError, suggestion
from paceline.run.callbacks.fence import FencedCollectives, meet
from paceline.run.callbacks.moment import CallbackMoment
from paceline.run.callbacks.written import WrittenState
from paceline.run.process.world import World
from paceline.spec.import_paths import HOOKS, load_object

DECIDES = {"stop": ("after_step", "after_evaluation"), "skip": ("before_step",), "lr": ("before_step",), "log": HOOKS}
STATE = ("state", "load")


@dataclass
class CallbackDecisions:
    """What the callbacks have decided at a hook, each with the name of the one that did."""

    stop: tuple[str, str] | None = None
    skip: tuple[str, str] | None = None
    lr: tuple[str, float] | None = None
    logs: list[tuple[str, Mapping[str, float]]] = field(default_factory=list)


@dataclass(frozen=True)
class _Callback:
    name: str
    hooks: Mapping[str, Callable[[CallbackMoment], object]]
    made: Any


class Callbacks:
    """The callbacks of a task, in their order."""

    def __init__(self, given: Sequence[object]) -> None:
        """Raise ConfigError for what cannot be imported or made, or has no hook."""
        self._all = [_made(each) for each in given]
        self._mark: dict[str, Any] = {}
        self._state: WrittenState | None = None
        names = [each.name for each in self._all]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"two callbacks are called {twice[0]}", "decisions and states are kept by name",
                "an attribute `name` of their own",
            )  # fmt: skip

    def has(self, hook: str) -> bool:
        """Return whether anything is called at a hook."""
        return any(hook in each.hooks for each in self._all)

    def at(self, hook: str, moment: CallbackMoment) -> CallbackDecisions:
        """Call everything that has this hook and return what it decides. Every rank calls it.

        Raises what a callback raises, and ConfigError on all ranks where they do not agree.
        """
        found = CallbackDecisions()
        said: list[tuple[str, object]] = []
        state = self._watched(moment)
        for each in self._all:
            if hook not in each.hooks:
                continue
            where = f"{each.name}.{hook} at step {moment.step}"
            with FencedCollectives(moment.world, where, state):
                decided = _checked(each.hooks[hook](moment), each.name, hook)
            said.append((each.name, decided))
            _take(found, each.name, decided)
        if said:
            wrote, holds = (state.told(), state.holds) if state is not None else ("", str)
            meet(moment.world, f"{hook} at step {moment.step}", _told(said), wrote, holds)
        return found

    def _watched(self, moment: CallbackMoment) -> WrittenState | None:
        """Return what notes what a hook writes from now on, where there are other ranks to compare it with."""
        if moment.world.size == 1:
            return None
        if self._state is None or not self._state.is_of(moment.model):
            self._state = WrittenState(moment.model)
        self._state.begin(moment.optimizer)
        return self._state

    def state(self) -> dict[str, object]:
        """Return what the callbacks keep, by name. Raises ConfigError for what is no plain data."""
        found = {each.name: each.made.state() for each in self._all if hasattr(each.made, "state")}
        for name, state in found.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"the state of the callback {name} cannot be saved", str(error), "plain data: numbers, texts, lists"
                ) from error
        return found

    def load(self, states: Mapping[str, object] | None) -> None:
        """Give the callbacks what they kept."""
        for each in self._all:
            if states and each.name in states and hasattr(each.made, "load"):
                each.made.load(states[each.name])

    def mark(self) -> None:
        """Note what the callbacks keep now, which `put_back` gives them again."""
        self._mark = json.loads(json.dumps(self.state()))

    def unmark(self) -> None:
        """Note that what has been called since the mark is done, and stays."""
        self._mark = {}

    def put_back(self) -> None:
        """Give the callbacks what they kept at the mark, where there is one: what was called since is called again."""
        self.load(self._mark)
        self._mark = {}


def _made(given: object) -> _Callback:
    found = load_object(given, "task.callbacks") if isinstance(given, str) else given
    path = given if isinstance(given, str) else getattr(given, "__qualname__", type(given).__name__)
    made = found() if inspect.isclass(found) else found
    if inspect.isfunction(made):
        return _Callback(path.rpartition(":")[2], {"after_step": made}, made)
    hooks = {name: getattr(made, name) for name in HOOKS if callable(getattr(made, name, None))}
    name = str(getattr(made, "name", "") or type(made).__name__)
    near = [each for each in dir(made) if each.startswith(("on_", "before_", "after_")) and each not in HOOKS]
    if near or not hooks:
        raise ConfigError(
            f"task.callbacks: {name} has {f'a method {near[0]}' if near else 'no hook'}",
            f"hooks are {', '.join(HOOKS)}",
            suggestion(near[0], HOOKS) if near else "a class with one of them, or a function of a moment",
        )
    if hasattr(made, STATE[0]) != hasattr(made, STATE[1]):
        raise ConfigError(
            f"task.callbacks: {name} has one of state() and load()", "what is saved must be given back", "both"
        )
    return _Callback(name, hooks, made)


def _checked(decided: object, name: str, hook: str) -> Mapping[str, object]:
    """Return what a hook decided. Raises ConfigError for what no hook, or not this one, can decide."""
    if decided is None:
        return {}
    if not isinstance(decided, Mapping):
        raise ConfigError(
            f"{name}.{hook} returned a {type(decided).__name__}", "a hook returns None or a dict of decisions",
            'such as {"stop": "it is good enough"}',
        )  # fmt: skip
    for key, value in decided.items():
        if hook not in DECIDES.get(key, ()):
            where = f"it is decided at {', '.join(DECIDES[key])}" if key in DECIDES else "there is no such decision"
            can = [each for each, hooks in DECIDES.items() if hook in hooks]
            raise ConfigError(f"{name}.{hook} cannot decide '{key}'", where, suggestion(str(key), can))
        numbers = list(value.values()) if key == "log" and isinstance(value, Mapping) else [value]
        wanted = str if key in ("stop", "skip") else int | float
        if (key == "log" and not isinstance(value, Mapping)) or not all(isinstance(n, wanted) for n in numbers):
            meant = {"log": "numbers by name", "lr": "a number"}.get(key, "the reason, as text")
            raise ConfigError(f"{name}.{hook} decides {key} = {value!r}", f"it takes {meant}", meant)
        if key == "lr" and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}.{hook} decides lr = {value}", "it is no rate", "a number of 0 or more")
    return decided


def _take(found: CallbackDecisions, name: str, decided: Mapping[str, Any]) -> None:
    """Add decisions to those of the callbacks before: the first that stops or skips is told, the last rate holds."""
    if "stop" in decided:
        found.stop = found.stop or (name, decided["stop"])
    if "skip" in decided:
        found.skip = found.skip or (name, decided["skip"])
    if "lr" in decided:
        found.lr = (name, float(decided["lr"]))
    if decided.get("log"):
        found.logs.append((name, {str(what): float(value) for what, value in decided["log"].items()}))


def _told(said: Sequence[tuple[str, object]]) -> str:
    """Return decisions as text, to the last bit of their numbers."""
    parts = [f"{name} decided {json.dumps(decided, sort_keys=True, default=repr)}" for name, decided in said if decided]
    return ", ".join(parts) or "nothing was decided"


def moment_of(world: World, step: int, steps: int, position: int, built: Any, **more: Any) -> CallbackMoment:
    """Return the moment of a run that has been assembled."""
    return CallbackMoment(step, steps, position, built.model, built.optimizer, world, **more)
