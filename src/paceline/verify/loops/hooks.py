"""Hooks on the gradients of weights (`register_hook`), which a copy of a module lacks.

A hook of a loop's weight may belong to the model (a mask, a factor), and then one device has it too, or to the loop (a
sum over ranks, a division by their number), and then one device has none. Nothing tells the two apart: the model's are
those of the module that the caller says is plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from paceline.task.models.copied import copied
from paceline.verify.loops.unwrapped import named


class WeightHooks:
    """The hooks on the weights of a module, for its copies."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self._hooks: dict[str, list[Callable[[Tensor], Tensor | None]]] = {
            name: list(weight._backward_hooks.values()) for name, weight in weights.items() if weight._backward_hooks
        }

    def put(self, module: nn.Module) -> nn.Module:
        """Give these hooks to the weights of a module, which has none, and return it."""
        weights = named(module)
        for name in self._hooks.keys() & weights.keys():
            for hook in self._hooks[name] if weights[name].requires_grad else ():
                weights[name].register_hook(hook)
        return module

    def copied(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module whose weights have these hooks, and no others."""
        return self.put(copied(module))
