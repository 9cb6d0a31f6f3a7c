"""What a step asks of the way in which copies stay in step, and the way that is taken by default: in every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from paceline.checkpoint.state import OPTIMIZER
from paceline.run.process.world import World
from paceline.run.replicas.bucket_sums import BucketSum
from paceline.run.updates.shards import wrapped
from paceline.task.models.held import is_spread
from paceline.task.plain_names import named_parameters

SyncState = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepTotals:
    """What a step adds up to over some ranks, before its update."""

    loss: float  # a sum
    weight: float
    grad_norm: float  # of the mean gradient, before clipping
    stop: float  # ranks that asked to stop


class CopySync(Protocol):
    """Keeps copies of a model in step. Every rank calls the same methods in the same order."""

    @property
    def ranks(self) -> int:
        """How many ranks' gradients make one update: those of all copies, or of one."""

    def add_up(self, vector: torch.Tensor) -> None:
        """Put the sum over the ranks whose gradients make one update in the place of a vector, without waiting."""

    def over_all(self, totals: StepTotals) -> StepTotals:
        """Return the totals over all copies, for those of one update; a norm is then the root of the mean square."""

    def after_update(self, step: int) -> None:
        """Bring copies together where it is time to, once the optimizer has changed the weights."""

    def apart_after(self, step: int) -> int | None:
        """Return the number of this rank's copy where copies may differ when a step is over, else None."""

    def named(self, state: SyncState) -> SyncState:
        """Return the state of training, live, under the names that it has in checkpoints, with what the sync keeps."""

    @property
    def optimizer_prefix(self) -> str:
        """What names of the optimizer's state begin with in checkpoints."""


@dataclass(frozen=True)
class EveryStep:
    """Copies make every update together. `sums` may keep something for each copy; none needs bringing together."""

    world: World
    model: nn.Module
    sums: BucketSum | None = None
    copy: int = 0  # this rank's
    optimizer_prefix: str = OPTIMIZER

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.world.size

    def add_up(self, vector: torch.Tensor) -> None:
        """Put the sum over all ranks in the place of a vector."""
        self.world.add_up(vector)

    def over_all(self, totals: StepTotals) -> StepTotals:
        """Return the totals, which are of all copies."""
        return totals

    def after_update(self, step: int) -> None:
        """Nothing to do: copies took the same update."""

    def apart_after(self, step: int) -> int | None:
        """Return None: copies never differ."""
        return None

    def named(self, state: SyncState) -> SyncState:
        """Return the state, and what sums keep of this copy."""
        kept = self.sums.kept() if self.sums else {}
        return {**state, **of_parameters(self.model, kept, f"copy{self.copy}.left.")}


def of_parameters(
    model: nn.Module, values: Mapping[nn.Parameter, torch.Tensor], before: str, after: str = ""
) -> SyncState:
    """Return tensors that follow this rank's parts of parameters by name, sharded as the parameters are."""
    return {
        f"{before}{name}{after}": wrapped(values[p], p) if is_spread(p) else values[p]
        for name, p in named_parameters(model)
        if p in values
    }
