"""Weights that no rank reached, remembered from the last time that ranks asked each other.

A weight that no rank's backward passes reached has no gradient, and the host has to ask the device which these are. As
long as every rank misses the same weights as then they are the same, and nobody asks: a rank whose weights are others
says so in the sums that a step waits for anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from torch import Tensor, nn


class SettledWeights:
    """What one rank remembers. Weights that the rank missed are told apart by any key, such as a name."""

    def __init__(self) -> None:
        self._missed: frozenset[Hashable] = frozenset()
        self._unreached: Sequence[nn.Parameter] = ()
        self._taken: list[tuple[nn.Parameter, Tensor | None]] = []

    def news(self, missed: Collection[Hashable]) -> int:
        """Return how many weights this rank missed in a step; 0 where they are the ones that were settled last.

        The gradients of what no rank reached then are taken at once, and `settle` gives them back where another rank
        has news. A rank that has missed some before and now misses none has news too: 1.
        """
        self._taken = []
        if self._missed != (now := frozenset(missed)):
            return len(now) or 1
        self._taken = [(weight, weight.grad) for weight in self._unreached]
        for weight in self._unreached:
            weight.grad = None
        return 0

    def give_back(self) -> None:
        """Give gradients back that `news` has taken: some rank missed others than before."""
        for weight, gradient in self._taken:
            weight.grad = gradient
        self._taken = []

    def settle(self, missed: Collection[Hashable], unreached: Sequence[nn.Parameter]) -> None:
        """Take the gradients from what no rank reached, and remember it with what this rank missed."""
        self._missed, self._unreached = frozenset(missed), unreached
        for weight in unreached:
            weight.grad = None

    def forget(self) -> None:
        """Hold no gradients: the next step begins."""
        self._taken = []
