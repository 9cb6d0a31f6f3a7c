"""Protocols of a step: the update of the weights, and the watch over gradients and updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn


class Updates(Protocol):
    """Changes weights by their gradients."""

    def step(self) -> object:
        """Make one update."""


class StepWatch(Protocol):
    """Looks at the gradients and the updates of some steps (run/observe/health/meter.py)."""

    @property
    def is_measuring(self) -> bool:
        """Whether the step that is made is one of those."""

    def begin(self, step: int) -> None:
        """A step begins, or begins again."""

    def before_update(self, parameters: Sequence[nn.Parameter], correction: float) -> None:
        """The gradients are complete, and `correction` is their factor."""

    def after_update(self) -> None:
        """The weights have changed."""
