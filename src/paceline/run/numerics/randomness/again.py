"""Parts of a model in which torch leaves the mode behind: what is run again in a backward pass, and what is compiled.

Modules that draw enter the mode by themselves there. A part that is run again draws for the samples that it had. Parts
that draw are not compiled: the compiler's random numbers are its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from paceline.run.numerics.randomness.mode import SampleRandomness

DRAWS_BY = "paceline_randomness"  # attribute of the modules of a model whose random numbers belong to samples
NAMED = 3  # blocks that a remark names


def draw_again(model: nn.Module, randomness: SampleRandomness) -> None:
    """Make all modules of `model` that draw go through `randomness`, wherever they are called, in place."""
    kinds = (*randomness.survey.modules, _DropoutNd)
    for module in model.modules():
        if getattr(module, DRAWS_BY, None) is randomness:
            continue
        setattr(module, DRAWS_BY, randomness)
        if isinstance(module, kinds):
            module.forward = functools.partial(_within, randomness, module, module.forward)


def draws_inside(part: nn.Module) -> bool:
    """Return whether a part of a model draws, as far as the look at the model has told. A dropout of 0 does not."""
    randomness: SampleRandomness | None = getattr(part, DRAWS_BY, None)
    kinds = randomness.survey.modules if randomness is not None else ()
    return any(m.p > 0 if isinstance(m, _DropoutNd) else isinstance(m, kinds) for m in part.modules())


def uncompiled_remark(blocks: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return what is said of blocks, by name, that are not compiled because they draw."""
    every = list(blocks)
    names = [name for name, block in every if draws_inside(block)]
    if not names:
        return []
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    which = f" ({', '.join(names[:NAMED])}{more})" if any(names) else ""
    return [
        f"compile: {len(names)} of {len(every)} blocks{which} run uncompiled, since they draw random numbers: the "
        "compiler's own would follow the micro-batch; a dropout of 0 has them compiled"
    ]


def leave_outside(blocks: Iterable[nn.Module], randomness: SampleRandomness) -> None:
    """Have compiled blocks run outside of the mode, in place."""
    for block in blocks:
        if not draws_inside(block):
            block.forward = functools.partial(_outside, randomness, block.forward)


def samples_of(module: nn.Module) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context within which a module draws for the samples that it draws for now."""
    randomness: SampleRandomness | None = getattr(module, DRAWS_BY, None)
    return contextlib.nullcontext if randomness is None else functools.partial(randomness.turned_to, randomness.rows)


def _within(
    randomness: SampleRandomness, module: nn.Module, forward: Callable[..., object], *args: object, **kwargs: object
) -> object:
    is_off = isinstance(module, _DropoutNd) and module.p == 0  # as it is in a compiled block
    if is_off or randomness.is_entered or randomness.rows is None:
        return forward(*args, **kwargs)
    with randomness.again():
        return forward(*args, **kwargs)


def _outside(randomness: SampleRandomness, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    if not randomness.is_entered:
        return forward(*args, **kwargs)
    randomness.__exit__(None, None, None)
    try:
        return forward(*args, **kwargs)
    finally:
        randomness.__enter__()
