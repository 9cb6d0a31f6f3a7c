"""Samples that a twin reads where the first ones of the data have no item to learn from: few images have a box.

A step of a run reads so many samples that some have items, and a twin's nine may have none. Where a proof ends for
that, it is made again on samples of which two in three have some.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import nn

from paceline.run.numerics.precision import MASTER_DTYPES, cast_floats
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.data.order.of_source import GlobalOrder, ids_at
from paceline.task.data.protocol import GathersRows, Source
from paceline.task.turns import Turn, turns_of
from paceline.verify.reference.passes import reference_model
from paceline.verify.reference.plain_documents import placed_plainly
from paceline.verify.twin.fold import ChangedSource

LOOKED = 2048  # samples that are asked for their items, at most
WANTED = 32  # samples with items, for each objective
TOGETHER = 16  # samples that are asked at once
SECONDS = 120.0  # of looking, for all objectives together: a large model's passes over all samples would take hours
HAVING = 2  # samples with items for each one without


class ChosenSource(ChangedSource):
    """Some samples of another source, by numbers of their own, in another order in each epoch."""

    def __init__(self, source: Source, chosen: Sequence[int]) -> None:
        super().__init__(source, "chosen")
        self.samples, self.order = len(chosen), GlobalOrder(len(chosen))
        self._chosen = np.array(chosen, dtype=np.int64)

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the batch of the other source."""
        return self.changes.read(self._chosen[ids], positions)

    def gather(self, ids: npt.NDArray[np.int64]) -> Any:
        """Return what `batch` makes batches of these samples from, where the other source gathers rows."""
        return cast(GathersRows, self.changes).gather(self._chosen[ids])

    def batch(self, gathered: Any, first: int, last: int) -> Any:
        """Return the batch of the gathered rows first..last."""
        return cast(GathersRows, self.changes).batch(gathered, first, last)


def of_chosen(source: Source, chosen: Sequence[int]) -> Source:
    """Return the source with these samples alone; itself without any."""
    return cast(Source, ChosenSource(source, chosen)) if chosen else source


def samples_with_items(task: Task, plan: Plan, source: Source) -> tuple[int, ...]:
    """Return ids of samples with items for each objective, and of some without; none where an objective has none.

    Those that are found within SECONDS.
    """
    end = time.monotonic() + SECONDS
    dtype = MASTER_DTYPES[plan.precision]
    model = reference_model(task, source, source.items_per_sample, dtype)
    first = ids_at(source, task.seed, np.arange(min(LOOKED, source.samples), dtype=np.int64)).tolist()
    in_order = list(dict.fromkeys(first))  # a mixture may have read a source twice

    def counted(turn: Turn, ids: Sequence[int]) -> float:
        at = np.array(ids, dtype=np.int64)
        return _items(turn, model, cast_floats(source.read(at, at), dtype))

    having: list[list[int]] = []
    for turn in turns_of(task, source.unit):
        found: list[int] = []
        for piece in (in_order[at : at + TOGETHER] for at in range(0, len(in_order), TOGETHER)):
            if len(found) >= WANTED or time.monotonic() > end:
                break
            if counted(turn, piece):
                found += [each for each in piece if counted(turn, [each])]
        having.append(found[:WANTED])
    if not all(having):
        return ()
    each = list(dict.fromkeys(one for turn in itertools.zip_longest(*having) for one in turn if one is not None))
    without = [one for one in in_order if one not in set(each)][: len(each) // HAVING]
    return tuple(each + without)


def _items(turn: Turn, model: nn.Module, rows: Any) -> float:
    """Return how many items an objective counts in these rows; none where it cannot be asked of so few."""
    with contextlib.suppress(Exception):  # whatever a program says to other rows than a run gives it
        return float(turn.objective(model, placed_plainly(turn.objective, rows))[1])
    return 0.0
