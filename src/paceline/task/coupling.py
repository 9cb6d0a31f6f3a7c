"""Coupled losses: those in which the rows of a batch see each other, as in InfoNCE or batch statistics.

A step is a sum over rows, so that a batch may be cut into micro-batches and over ranks. A coupled loss is none: cut, it
is another loss. It says so, on the objective or on the model, by `coupled = "batch"`, and then runs on the whole batch
in one piece. An objective that takes a third argument, `gather_rows`, may still be spread over the data ranks:

    def info_nce(model, batch, gather_rows):
        ours, theirs = model(batch)                # [rows, width] each, of this rank's rows
        everyone, own = gather_rows(theirs)        # [all rows, width] with gradients, and which of them are ours
        labels = torch.arange(own.start, own.stop, device=ours.device)
        return F.cross_entropy(ours @ everyone.T, labels, reduction="sum"), len(ours)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.task.models.layers.batch_norm import sees_whole_batch

BATCH = "batch"
ARGUMENT = "gather_rows"


class GatherRows(Protocol):
    """Brings the rows of all data ranks together."""

    def __call__(self, x: Tensor) -> tuple[Tensor, slice]:
        """Return `x` [rows, ...] of every rank in the order of the batch, [all rows, ...], and which rows are ours."""

    def without_own(self) -> GatherRows:
        """Return what gathers rows on a rank whose own rows only stand in for missing ones: nobody sees these."""


@dataclass(frozen=True)
class OneDevice:
    """All rows are here already."""

    def __call__(self, x: Tensor) -> tuple[Tensor, slice]:
        """Return `x` itself, and all of its rows."""
        return x, slice(0, len(x))

    def without_own(self) -> OneDevice:
        """Return this gathering itself: a device alone has rows in every batch."""
        return self


@dataclass(frozen=True)
class GatheringObjective:
    """An objective with its third argument filled in; called as every other one."""

    objective: Callable[..., tuple[Tensor, Any]]
    gather_rows: GatherRows = OneDevice()
    coupled: str = BATCH

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Return (loss_sum, weight) of this rank's rows."""
        return self.objective(model, batch, gather_rows=self.gather_rows)

    def over(self, gather_rows: GatherRows) -> GatheringObjective:
        """Return the objective for a rank among several."""
        return dataclasses.replace(self, gather_rows=gather_rows)


def with_gather(objective: Callable[..., Any]) -> Callable[[nn.Module, Any], Any]:
    """Return an objective of two arguments: the same, or one that gathers rows, for one device."""
    try:
        parameters = inspect.signature(objective).parameters
    except (TypeError, ValueError):  # a callable that tells no signature
        return objective
    return GatheringObjective(objective) if ARGUMENT in parameters else objective


def without_own_rows(objective: Any) -> Any:
    """Return the objective for rows that only stand in for missing ones."""
    if gathers_rows(objective):
        return objective.over(objective.gather_rows.without_own())
    inside = getattr(objective, "objective", None)  # of one that a layout has wrapped
    return objective if inside is None else dataclasses.replace(objective, objective=without_own_rows(inside))


def is_coupled(model: object, objective: object) -> bool:
    """Return whether the rows of a batch see each other: by declaration, or in an nn.SyncBatchNorm."""
    return declares_coupling(model, objective) or sees_whole_batch(model)


def declares_coupling(model: object, objective: object) -> bool:
    """Return whether the model or the objective declares that the rows of a batch see each other."""
    said = [getattr(one, "coupled", None) for one in (objective, model)]
    wrong: list[object] = [value for value in said if isinstance(value, str) and value != BATCH]
    wrong += [said[0]] if said[0] is True else []  # of an objective: a model may mean anything else by it
    for value in wrong:
        raise ConfigError(f"coupled = {value!r}", "only the rows of a batch can be coupled", f'coupled = "{BATCH}"')
    return BATCH in said


def gathers_rows(objective: object) -> bool:
    """Return whether the objective brings the rows of all data ranks together itself."""
    return isinstance(objective, GatheringObjective)
