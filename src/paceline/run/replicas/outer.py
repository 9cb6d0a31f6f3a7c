"""The outer step: copies make steps by themselves, and then move what they share by the mean of their changes.

With W the shared weights and w the weights of a copy after its own steps, the change is d = W - w, its mean over the
copies the gradient of the outer optimizer, SGD with Nesterov momentum:

    m <- momentum * m + mean(d)        W <- W - lr * (mean(d) + momentum * m)        w <- W

The state of a copy's own optimizer stays with the copy (Douillard et al. 2023, DiLoCo, arXiv:2311.08105, algorithm 1).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.state import OPTIMIZER
from paceline.run.process.groups import Mesh
from paceline.run.process.world import World
from paceline.run.replicas.allreduce import grouped
from paceline.run.replicas.copy_sync import StepTotals, SyncState, of_parameters
from paceline.spec.plan import Plan
from paceline.task.models.held import local_of
from paceline.task.plain_names import named_parameters


class OuterSteps:
    """Copies of `model` that are brought together after every so many steps. Its weights must have their values."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, world: World) -> None:
        self._model, self._sync, self._world = model, plan.sync, world
        self._group, self._own = mesh.get_group("dp_replicate"), mesh.copy
        self.copies, self.copy = plan.layout.dp_replicate, mesh.get_local_rank("dp_replicate")
        self.ranks = world.size // self.copies
        trained = [parameter for _, parameter in named_parameters(model) if parameter.requires_grad]
        self._runs = grouped(trained, plan.bucket_bytes)
        self._shared = {p: local_of(p).detach().clone() for p in trained}
        self._momentum = {p: torch.zeros_like(part) for p, part in self._shared.items()} if plan.sync.momentum else {}

    @property
    def optimizer_prefix(self) -> str:
        """What names of the state of this copy's optimizer begin with."""
        return f"copy{self.copy}.{OPTIMIZER}"

    def add_up(self, vector: Tensor) -> None:
        """Put the sum over the ranks of this copy in the place of a vector."""
        if self.ranks > 1:
            dist.all_reduce(vector, group=self._own)

    def over_all(self, totals: StepTotals) -> StepTotals:
        """Return the totals over all copies; the norm is the root of the mean square of the copies' norms."""
        mine = [totals.loss, totals.weight, totals.grad_norm**2 / self.copies, totals.stop]
        loss, weight, square, stop = self._world.sum([value / self.ranks for value in mine])  # all of a copy have them
        return StepTotals(loss, weight, math.sqrt(square) if square >= 0 else math.nan, stop)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Move the shared weights by the mean change of the copies, where it is time to, and have all begin there."""
        if self._sync.differs_after(step):
            return
        for parameters in self._runs:
            changes = [(self._shared[p] - local_of(p)).flatten() for p in parameters]
            mean = torch.cat(changes)
            dist.all_reduce(mean, group=self._group)
            mean /= self.copies
            for parameter, change in zip(parameters, mean.split([len(own) for own in changes]), strict=True):
                self._move(parameter, change.view(self._shared[parameter].shape))

    def _move(self, parameter: nn.Parameter, change: Tensor) -> None:
        shared, momentum = self._shared[parameter], self._sync.momentum
        if momentum:
            self._momentum[parameter].mul_(momentum).add_(change)
            change = change + momentum * self._momentum[parameter]
        shared.sub_(change, alpha=self._sync.lr)
        local_of(parameter).copy_(shared)

    def apart_after(self, step: int) -> int | None:
        """Return the number of this rank's copy between outer steps."""
        return self.copy if self._sync.differs_after(step) else None

    def named(self, state: SyncState) -> SyncState:
        """Return shared weights as the model's, and under each copy's own names its weights and optimizer's state."""
        shared = of_parameters(self._model, self._shared, "model.")
        own = {f"copy{self.copy}.{name}": tensor for name, tensor in state.items()
               if name in shared or name.startswith(OPTIMIZER)}  # fmt: skip
        same = {name: tensor for name, tensor in state.items() if f"copy{self.copy}.{name}" not in own}
        return {**same, **shared, **own, **of_parameters(self._model, self._momentum, "outer.", ".momentum")}
