"""The update of sharded weights, made of the parts that this rank holds: plain tensors, in torch's own kernel.

An update of AdamW, Adam or SGD changes each element by its own history, so a rank needs nothing of the others. torch's
kernel would take the sharded tensors too, and works out first how each of them lies on its mesh: all of it in the first
step of every world, and some of it again in each step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.optim.optimizer as of_all
from torch import Tensor

from paceline.checkpoint import materialise_optimizer_state
from paceline.task.models.held import is_spread, local_of
from paceline.task.optimizer.eager import eager

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # by torch's names, of which none is public
GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
TORCHS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
KINDS = (*TORCHS, *map(eager, TORCHS))


class UpdateOfParts:
    """Makes the steps of an optimizer over sharded weights. The state stays the optimizer's, where anybody reads it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        assert type(optimizer) in KINDS, optimizer
        self.optimizer = optimizer
        self._workers: list[torch.optim.Optimizer] = []  # one for each group, over the parts of its weights

    @staticmethod
    def serves(optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer's weights are sharded, and an update of one element needs no other."""
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        return type(optimizer) in KINDS and any(is_spread(weight) for weight in weights)

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient, as the optimizer's own step does."""
        if not self._may():
            self.optimizer.step()
            return
        for number, group in enumerate(self.optimizer.param_groups):
            weights = [weight for weight in group["params"] if weight.grad is not None]
            parts = [local_of(weight) for weight in weights]
            worker = self._worker(number, group, parts)
            worker.param_groups[0].update({**group, "params": parts})
            for weight, part in zip(weights, parts, strict=True):
                if part is not weight:
                    part.grad = local_of(weight.grad)
                worker.state[part] = {name: _part_of(value) for name, value in self.optimizer.state[weight].items()}
            worker.step()
            worker.state.clear()
            worker.param_groups[0]["params"] = []
            for weight, part in zip(weights, parts, strict=True):
                if part is not weight:
                    part.grad = None

    def _may(self) -> bool:
        """Return whether the parts can be updated by themselves: all have their state, and nobody watches the steps."""
        optimizer = self.optimizer
        hooks = [getattr(optimizer, name, None) for name in HOOKS]
        hooks += [getattr(of_all, name, None) for name in GLOBAL_HOOKS]
        if any(hooks) or "step" in vars(optimizer):  # as by a scheduler of torch's
            return False
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if isinstance(optimizer, torch.optim.Adam) and all(
            weight.grad is not None or optimizer.state.get(weight) or not weight.requires_grad for weight in weights
        ):
            materialise_optimizer_state(optimizer)  # as its own step begins: no weight gets state that had none
        reached = [weight for weight in weights if weight.grad is not None]
        return all(optimizer.state.get(weight) and _lie_alike(weight, weight.grad) for weight in reached)

    def _worker(self, number: int, group: dict[str, Any], parts: list[Tensor]) -> torch.optim.Optimizer:
        if number == len(self._workers):
            kind: Any = type(self.optimizer)
            self._workers.append(kind([{**group, "params": parts or [torch.zeros(0)]}]))
        return self._workers[number]


def _part_of(value: object) -> object:
    return local_of(value) if isinstance(value, Tensor) else value


def _lie_alike(weight: Tensor, gradient: Tensor) -> bool:
    """Return whether a gradient's part on this rank is that of the weight's."""
    if is_spread(weight) and is_spread(gradient):
        return weight.placements == gradient.placements
    return not is_spread(weight) and not is_spread(gradient)
