"""The gradients of a loop's step as the optimizer took them: after the update a loop may change or drop gradients.

A GAN's generator goes back through its judge, and a loop may clear gradients at the end of its step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.errors import ConfigError


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with all of its values; that of an embedding may be sparse: the rows that were looked up."""
    return gradient.to_dense() if gradient.is_sparse else gradient


class GradientsTaken:
    """Looks at what optimizers of torch's take of some parameters; of all others, at what the step leaves on them."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self._weights = weights
        self._names = {parameter: name for name, parameter in weights.items()}
        self._taken: dict[str, torch.Tensor | None] = {}
        self._looks: dict[Optimizer, RemovableHandle] = {}

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Look at updates inside the block."""
        self._taken = {}
        self._looks = {}
        handle = register_optimizer_step_pre_hook(self._begin)
        try:
            yield
        finally:
            for each in (handle, *self._looks.values()):
                each.remove()

    def found(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the last update inside the block, of those parameters that have one."""
        found = {name: self._taken.get(name, p.grad) for name, p in self._weights.items()}
        return {name: dense(gradient) for name, gradient in found.items() if gradient is not None}

    def of_step(self, number: int) -> dict[str, torch.Tensor]:
        """Return the gradients of the last update inside the block. Raises ConfigError where there are none at all."""
        gradients = self.found()
        if not gradients:
            raise ConfigError(
                f"no parameter has a gradient after step {number}",
                "no optimizer of torch's updates the model's own parameters, and the step sets gradients to None",
                "optimizer.zero_grad() at the beginning of the step",
            )
        return gradients

    def _begin(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Have an update looked at after the optimizer's own hooks, which may clip."""
        if optimizer not in self._looks:
            self._looks[optimizer] = optimizer.register_step_pre_hook(self._look)

    def _look(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            return  # a closure computes the gradients that are taken, after this
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (name := self._names.get(parameter)) is not None:
                    gradient = parameter.grad
                    self._taken[name] = None if gradient is None else gradient.detach().clone()
