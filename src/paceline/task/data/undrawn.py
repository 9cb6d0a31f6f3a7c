"""Whether reading has drawn from the global generators of Python and numpy: told at little cost.

To keep numpy's state and set it back takes as long as to read a dozen small rows, and few data sets draw from it.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np

WORDS = 624  # of a Mersenne twister; where it stands in them comes after them
BYTES = 4 * (WORDS + 1)


class UndrawnGenerators:
    """Watches the generators of Python and numpy from `begin` on."""

    def __init__(self) -> None:
        self._plain: bytes | None = None  # numpy's memory in which, as was seen, no second normal number waits
        self._python: Any = None

    def begin(self) -> bool:
        """Note where the generators are; return whether it can be told later that they were left alone.

        It cannot where numpy has another generator, or has drawn an odd number of normal numbers: the next one is
        given without a draw.
        """
        memory = _memory()
        if memory is None or (memory != self._plain and not _is_all(memory)):
            return False
        self._plain, self._python = memory, random.getstate()
        return True

    def were_drawn_from(self) -> bool:
        """Return whether the generators are elsewhere, and set them back in that case."""
        assert self._plain is not None, "it was begun"
        if _memory() == self._plain and random.getstate() == self._python:
            return False
        key = np.frombuffer(self._plain, dtype=np.uint32, count=WORDS)
        place = int(np.frombuffer(self._plain, dtype=np.int32)[WORDS])
        random.setstate(self._python)
        np.random.set_state(("MT19937", key, place, 0, 0.0))
        return True


def _memory() -> bytes | None:
    """Return the memory of numpy's global generator; None where that is not numpy's default, MT19937."""
    generator = np.random.get_bit_generator() if hasattr(np.random, "get_bit_generator") else None
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, BYTES)


def _is_all(memory: bytes) -> bool:
    """Return whether the memory is laid out as it is taken to be, and tells all of the state."""
    told = np.random.get_state()
    if not isinstance(told, tuple):
        return False
    _, key, place, waits, _ = told
    return not waits and memory == key.tobytes() + np.int32(place).tobytes()
