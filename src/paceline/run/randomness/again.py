"""Modules that draw, run again in a backward pass: they must draw what they drew before.

torch leaves modes of functions behind when it goes backward, so a module that is run again there enters its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from paceline.run.randomness.mode import SampleRandomness


def draw_again(model: nn.Module, randomness: SampleRandomness) -> None:
    """Make all modules of `model` that draw go through `randomness`, in forward and in backward passes, in place."""
    kinds = (*randomness.survey.modules, _DropoutNd)
    for module in model.modules():
        known = vars(module).get("forward")
        if isinstance(module, kinds) and not (isinstance(known, functools.partial) and known.func is _within):
            module.forward = functools.partial(_within, randomness, module.forward)


def _within(randomness: SampleRandomness, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if randomness.is_entered:
        return forward(*args, **kwargs)
    with randomness.again():
        return forward(*args, **kwargs)
