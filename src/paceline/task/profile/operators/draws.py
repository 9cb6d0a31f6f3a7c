"""Which random numbers of a traced program belong to no sample: traces of two numbers of samples, compared."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from paceline.task.profile.operators.drawing import ATTENTION


@dataclass(frozen=True)
class RandomCall:
    """One call of a random operator: the shape that it gave, and the numbers that it was called with."""

    name: str
    shape: tuple[int, ...]
    numbers: tuple[float, ...]


def draw_of(name: str, args: Sequence[Any], out: Tensor) -> RandomCall:
    """Return a call; for a choice among weights the numbers say how many they are."""
    numbers = [value for value in args if isinstance(value, int | float)]
    if name == "multinomial":
        numbers.append(args[0].shape[-1])
    return RandomCall(name, tuple(out.shape), tuple(numbers))


def of_no_sample(few: Sequence[RandomCall], more: Sequence[RandomCall], rows: tuple[int, int]) -> set[str]:
    """Return the operators whose numbers are not those of single samples, by the calls for so many samples each."""
    if len(few) != len(more):
        return {f"{draw.name} (called more often for more samples)" for draw in more}
    return {
        f"{one.name} (over the samples of a micro-batch)"
        for one, other in zip(few, more, strict=True)
        if one.numbers != other.numbers or not _grows(one.shape, other.shape, rows)
    }


def _grows(few: tuple[int, ...], more: tuple[int, ...], rows: tuple[int, int]) -> bool:
    """Return whether a shape is one of all samples alike, or counts them in one dimension."""
    grown = [pair for pair in zip(few, more, strict=False) if pair[0] != pair[1]]
    return len(few) == len(more) and len(grown) <= 1 and all(one * rows[1] == other * rows[0] for one, other in grown)


class Steady:
    """Random operators of a program that runs for real, whose numbers depend on their place alone and on no shape.

    What a program decides by its numbers it then decides alike for any number of samples, so that the shapes of what it
    draws say for whom it draws. Dropout drops nothing: hidden states decide, too.
    """

    def __init__(self) -> None:
        self._calls = 0

    def run(self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, object]) -> object:
        """Return the result of a random operator of that name."""
        self._calls += 1
        torch.manual_seed(self._calls)  # whoever traces puts the state back
        result = func(*args, **kwargs)
        if name.startswith(ATTENTION):
            return result
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(result[1])
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel():
                leaf.fill_(1 if name.startswith("bernoulli") else leaf.flatten()[0].item())
        return result


def with_one_more(batch: object) -> object:
    """Return a batch, whose tensors count samples first, with its first sample once more."""
    return tree_map(
        lambda leaf: torch.cat([leaf, leaf[:1]]) if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
    )


@contextlib.contextmanager
def beside_torch(strays: list[str]) -> Iterator[None]:
    """Add to `strays` the generators beside torch's that are drawn from meanwhile, and put them back."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        if random.getstate() != pythons:
            strays.append("Python's module random")
            random.setstate(pythons)
        if _plain(np.random.get_state()) != _plain(numpys):
            strays.append("numpy.random")
            np.random.set_state(numpys)


def _plain(state: Any) -> tuple[Any, ...]:
    return (state[1].tobytes(), *state[2:])
