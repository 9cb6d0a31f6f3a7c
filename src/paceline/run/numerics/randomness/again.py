"""Parts of a model in which torch leaves the mode behind: what is run again in a backward pass, and what is compiled.

Modules that draw enter the mode by themselves there. A part that is run again draws for the samples that it had.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from paceline.run.numerics.randomness.mode import SampleRandomness

DRAWS_BY = "paceline_randomness"  # attribute of the modules of a model whose random numbers belong to samples


def draw_again(model: nn.Module, randomness: SampleRandomness, compiled: bool = False) -> None:
    """Make all modules of `model` that draw go through `randomness`, wherever they are called, in place.

    Where parts of the model are `compiled`, these modules are left out of it: the compiler knows no such mode.
    """
    kinds = (*randomness.survey.modules, _DropoutNd)
    for module in model.modules():
        if getattr(module, DRAWS_BY, None) is randomness:
            continue
        setattr(module, DRAWS_BY, randomness)
        if isinstance(module, kinds):
            forward = functools.partial(_within, randomness, module.forward)
            module.forward = _uncompiled(forward) if compiled else forward


def leave_outside(blocks: Iterable[nn.Module], randomness: SampleRandomness) -> None:
    """Have compiled blocks run outside of the mode, in place."""
    for block in blocks:
        block.forward = functools.partial(_outside, randomness, block.forward)


def samples_of(module: nn.Module) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context within which a module draws for the samples that it draws for now."""
    randomness: SampleRandomness | None = getattr(module, DRAWS_BY, None)
    return contextlib.nullcontext if randomness is None else functools.partial(randomness.turned_to, randomness.rows)


def _uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch's compiler leaves as it is; of a partial one it would look inside."""

    def left(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return torch.compiler.disable(left)


def _within(randomness: SampleRandomness, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if randomness.is_entered or randomness.rows is None:
        return forward(*args, **kwargs)
    with randomness.again():
        return forward(*args, **kwargs)


def _outside(randomness: SampleRandomness, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not randomness.is_entered:
        return forward(*args, **kwargs)
    randomness.__exit__(None, None, None)
    try:
        return forward(*args, **kwargs)
    finally:
        randomness.__enter__()
