"""What a callback sees of a run at a hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.run.loop.step import StepStats
from paceline.run.process.world import World


@dataclass(frozen=True)
class CallbackMoment:
    """A moment of a run, on one rank. Every rank is given one at the same hooks of the same steps."""

    step: int  # of the update: the next one at `before_step`, else the last one that was made
    steps: int  # of the whole run
    position: int  # samples consumed
    model: nn.Module  # as it is laid out on this rank
    optimizer: torch.optim.Optimizer
    world: World = field(repr=False)
    lr: float | None = None  # at `before_step`, by the schedule
    stats: StepStats | None = None  # at `after_step`: what the step did, over all ranks
    evaluation: Mapping[str, float] | None = None  # at `after_evaluation`: the loss and the metrics, over all ranks

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.world.rank

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.world.size

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all ranks. Every rank calls it."""
        return self.world.sum([float(value) for value in values])

    def gather(self, item: object) -> list[Any]:
        """Return every rank's picklable item, in rank order. Every rank calls it."""
        return self.world.gather(item)
