"""Random numbers that are not torch's: Python's and numpy's, and generators of theirs that a model holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn


class Others:
    """Where generators beside torch's stood when it was made: which have moved since, and the way back."""

    def __init__(self, model: nn.Module) -> None:
        self._read: dict[str, Callable[[], object]] = {
            "Python's module random": random.getstate,
            "numpy.random": _numpys,
        }
        self._set: dict[str, Callable[[Any], None]] = {
            "Python's module random": random.setstate,
            "numpy.random": np.random.set_state,
        }
        for path, module in model.named_modules():
            for name, held in vars(module).items():
                self._add(".".join(filter(None, (type(model).__name__, path, name))), held)
        self._states = {name: read() for name, read in self._read.items()}

    def moved(self) -> list[str]:
        """Return the names of the generators that drew since."""
        return [name for name, read in self._read.items() if _plain(read()) != _plain(self._states[name])]

    def restore(self) -> None:
        """Put all of them back to where they stood."""
        for name, state in self._states.items():
            self._set[name](state)

    def _add(self, name: str, held: Any) -> None:
        if isinstance(held, random.Random) and not isinstance(held, random.SystemRandom):
            self._read[name], self._set[name] = held.getstate, held.setstate
        elif isinstance(held, np.random.RandomState):
            self._read[name], self._set[name] = held.get_state, held.set_state
        elif isinstance(held, np.random.Generator):
            bits: Any = held.bit_generator
            self._read[name] = lambda: bits.state
            self._set[name] = lambda state: setattr(bits, "state", state)


def _numpys() -> object:
    return np.random.get_state()


def _plain(state: object) -> Any:
    """Return a state as something that `==` compares as a whole."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, tuple | list) else state
