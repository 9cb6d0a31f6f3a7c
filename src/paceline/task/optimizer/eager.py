"""Optimizers of torch that import no compiler, since nothing here compiles an update.

torch imports `torch._dynamo`, and sympy with it, as an optimizer is made, and again in its first step, so that both may
be compiled. What torch wraps for that stays within reach below its wrapper (`functools.wraps` leaves it as
`__wrapped__`). A subclass that calls it makes the same update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Kind = TypeVar("Kind")
# Of torch/_compile.py and torch/optim/optimizer.py: wrappers by the names of their code.
DISABLES = "_disable_dynamo.<locals>.inner"
USES_GRAD = "_use_grad_for_differentiable.<locals>._use_grad"
HOOKED = "Optimizer.profile_hook_step.<locals>.wrapper"
STEP_METHOD = "step"
MARKED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def _wrapper(function: object) -> str:
    """Return the name of a function's code, "" of what has none."""
    return getattr(getattr(function, "__code__", None), "co_qualname", "")


def _unmarked(kind: type) -> dict[str, object]:
    """Return what a class of optimizers has marked as not to be compiled, without the marks."""
    methods = {name: getattr(kind, name) for name in MARKED}
    return {name: method.__wrapped__ for name, method in methods.items() if _wrapper(method) == DISABLES}


def _plain_step(kind: type) -> dict[str, object]:
    """Return a step that follows gradients as the class's own does; none where its own imports nothing."""
    step = getattr(kind, STEP_METHOD)
    while _wrapper(step) == HOOKED:  # by an instance that was made before: torch hooks each class's step anew
        step = step.__wrapped__
    if _wrapper(step) != USES_GRAD:
        return {}
    update: Callable[..., object] = step.__wrapped__

    @functools.wraps(update)
    def uncompiled(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> object:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return update(self, *args, **kwargs)

    return {STEP_METHOD: uncompiled}


def eager(factory: Kind) -> Kind:
    """Return an optimizer's class of torch's as one of the same name that imports no compiler, others as they are."""
    is_torchs = isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer)
    if not is_torchs or not f"{factory.__module__}.".startswith("torch.optim."):
        return factory
    made: Kind = _subclass(factory)  # type: ignore[assignment]
    return made


@functools.cache
def _subclass(kind: type) -> type:
    own = {**_unmarked(kind), **_plain_step(kind)}
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**same, **own}) if own else kind


def _without_marks(kind: type[Kind]) -> type[Kind]:
    for name, method in _unmarked(kind).items():
        setattr(kind, name, method)
    return kind


@_without_marks
class EagerOptimizer(torch.optim.Optimizer):
    """What optimizers of our own are made of: torch's, without what marks its methods for the compiler."""
