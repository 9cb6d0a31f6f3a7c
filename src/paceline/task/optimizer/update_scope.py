"""What an update depends on, found out by trying: an element alone, its whole parameter, or other parameters too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.spec.optimizers import Use
from paceline.task.optimizer.eager import eager

# More than 4,096 elements: from there on 8-bit optimizers keep their state in blocks. Cuts are uneven, and below that.
MATRIX, VECTOR = (96, 64), (5000,)
CUTS = {2: [((37, 59), 0), ((41, 23), 1)], 1: [((1111, 3889), 0)]}  # by dimensions: (sizes, dimension)
STEPS = 3
LR = 1e-2
TOLERANCE = 1e-4  # of the largest change, in fp32; what depends on other elements differs in the first digits


def scope_known(use: Use) -> Use:
    """Return the optimizer with its scope: from its rule, else as its factory declares, else as a trial shows.

    Raises ConfigError for an optimizer that cannot be made, or draws random numbers: each rank would draw its own.
    """
    return use if use.scope else dataclasses.replace(use, scope=_tried(use))


def made(use: Use, lr: float, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    """Return an optimizer over groups of plain tensors. Raises ConfigError where it cannot be made, or is none."""
    try:
        optimizer = eager(use.factory)(groups, lr=lr, **use.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the optimizer '{use.name}' cannot be made", f"{type(error).__name__}: {error}",
            "task.optimizer.arguments holds what it takes beside `params` and `lr`",
        ) from error  # fmt: skip
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"task.optimizer.name = '{use.name}' returned a {type(optimizer).__name__}",
            "it must return a torch.optim.Optimizer over the groups that it gets", "return the optimizer",
        )  # fmt: skip
    return optimizer


def _tried(use: Use) -> str:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(MATRIX, generator=generator)
    try:
        _changes(use, [torch.randn(VECTOR, generator=generator)])
    except (RuntimeError, ValueError):  # ConfigError is one: it takes matrices alone
        wholes = [matrix, torch.randn(MATRIX, generator=generator)]
    else:
        wholes = [matrix, torch.randn(VECTOR, generator=generator)]
    alone = [change for whole in wholes for change in _changes(use, [whole])]
    if not _same(alone, [change for whole in wholes for change in _changes(use, [whole], seed=1)]):
        raise ConfigError(
            f"the optimizer '{use.name}' draws random numbers in its update", "ranks would draw different ones",
            "an option of it that turns this off, or another optimizer",
        )  # fmt: skip
    if not _same(alone, _changes(use, wholes)):
        return "model"
    for whole, change in zip(wholes, alone, strict=True):
        for sizes, dimension in CUTS[whole.dim()]:
            try:
                parts = _changes(use, list(whole.split(sizes, dimension)))
            except (RuntimeError, ValueError):  # it wants more of a parameter than a part of it
                return "parameter"
            if not _same([torch.cat(parts, dimension)], [change]):
                return "parameter"
    return "element"


def _changes(use: Use, values: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Return how some steps of one optimizer change parameters of these values, by gradients made of them."""
    weights = [nn.Parameter(value.clone(memory_format=torch.contiguous_format)) for value in values]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        optimizer = made(use, LR, [{"params": weights}])
        for step in range(STEPS):
            for weight, value in zip(weights, values, strict=True):
                weight.grad = torch.sin((7 + step) * value) * (1 + value.abs())
            try:
                optimizer.step()
            except TypeError as error:
                raise ConfigError(
                    f"the optimizer '{use.name}' makes no step", f"step() without a closure: {error}",
                    "an optimizer that takes the gradients as they are: a step computes its loss once",
                ) from error  # fmt: skip
    return [(weight - value).detach() for weight, value in zip(weights, values, strict=True)]


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) for a, b in pairs)
