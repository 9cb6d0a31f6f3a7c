"""Rows that keep what they drew when they were first read: a data set that holds augmented samples in memory.

A row's random numbers follow from its position, so that an image is cropped anew in each epoch, alike on every layout
and after every resume. One that is held as it was first read follows from which process read it when.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paceline.errors import DataError
from paceline.task.data.sources.mapped import MapSource, generators_kept

LOOKED = 3  # rows, of which the first that draws nothing says that none does
SEEDS = (1, 2)  # of two reads of a row


def row_that_keeps_its_draws(source: Any) -> int | None:
    """Return the number of a sample that draws when it is first read, and not when it is read again; None of none."""
    found = mapped_of(source)
    with contextlib.suppress(DataError):  # of a sample that cannot be read: who wants it says so
        if found is None:
            return None
        _draws(found, 0, SEEDS[0])  # what a data set makes once for all, as its first sample is read, may draw
        for index in _of(found.samples):
            if not _draws(found, index, SEEDS[0]):
                return None
            if not _draws(found, index, SEEDS[1]):
                return index
    return None


def mapped_of(source: Any) -> MapSource | None:
    """Return the data set of the user's that a source reads, through whatever is around it."""
    for _ in range(8):
        if source is None or isinstance(source, MapSource):
            return source
        source = getattr(source, "changes", getattr(source, "inner", None))
    return None


def _of(samples: int) -> Iterator[int]:
    """Yield numbers of some samples, among which are not those that every process has read for the fingerprint."""
    places = np.linspace(0, samples - 1, 2 * LOOKED + 1).astype(int)
    yield from dict.fromkeys(int(place) for place in places[1::2])


def _draws(source: Any, index: int, seed: int) -> bool:
    """Return whether reading a sample moves any of the generators of Python, numpy and torch."""
    with generators_kept():
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        before = _states()
        source.row(index)
        return _states() != before


def _states() -> tuple[object, ...]:
    numpys = [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    return random.getstate(), *numpys, torch.default_generator.get_state().numpy().tobytes()
