"""What a public function or class says of a call that does not fit: an error of ours, with the name that was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from paceline.config.declared import told_at_caller
from paceline.config.given import settled
from paceline.config.shape import Option
from paceline.errors import ConfigError, PacelineError, suggestion
from paceline.uncaught import end_with_code

P = ParamSpec("P")
R = TypeVar("R")


def argument(
    kind: str,
    doc: str = "",
    *,
    optional: bool = False,
    minimum: float | None = None,
    above: float | None = None,
    called: bool = False,
    objects: Mapping[str, str] | None = None,
) -> Option:
    """Return the declaration of an argument, of a kind as an option of a spec has it; `called` is a function.

    `objects` are what it takes in words, by the attributes that such an object has.
    """
    objects = dict(objects or {}) | ({"__call__": "a function"} if called else {})
    return Option("", kind, optional, None, doc, minimum=minimum, above=above, objects=objects)


SAY = argument("object", optional=True, called=True)
OVERRIDES = argument("texts", 'such as ["task.stop=5 steps"]')


def checked_call(**declared: Option) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks a call: names of arguments, and the values of those that are `declared`.

    Raises ConfigError with "did you mean", and puts the caller's place before every ConfigError of the function.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*values: P.args, **named: P.kwargs) -> R:
            with told_at_caller() as problems:
                with problems.noting():
                    bound = _bound(signature, name, values, named)
                    for key, option in declared.items():
                        if key in bound.arguments:
                            with problems.noting():
                                bound.arguments[key] = settled(option, key, bound.arguments[key])
                if not problems:
                    with problems.noting(), _of_a_script():
                        return function(*bound.args, **bound.kwargs)
            raise AssertionError("what was noted has been raised")

        return call

    return decorate


@contextmanager
def _of_a_script() -> Iterator[None]:
    """Have an error of ours that nobody catches, whatever its kind, end the script with its exit code."""
    try:
        yield
    except PacelineError:
        end_with_code()
        raise


def _bound(
    signature: inspect.Signature, name: str, values: tuple[object, ...], named: dict[str, object]
) -> inspect.BoundArguments:
    """Return the arguments by name. Raises ConfigError where they do not fit."""
    known = [each for each in signature.parameters if each != "self"]
    unknown = [each for each in named if each not in known]
    if unknown:
        fix = suggestion(unknown[0], known)
        raise ConfigError(f"{name}: unknown argument '{unknown[0]}'", f"it takes {', '.join(known)}", fix)
    try:
        return signature.bind(*values, **named)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", f"it takes {', '.join(known)}", "name the arguments") from None
