"""What a step asks of gradients, by whichever axes gradients are summed: an axis may wrap the sums of other axes."""

from __future__ import annotations

from typing import Protocol


class Gradients(Protocol):
    """How one step's gradients come together over ranks and micro-batches. After `finish` they are global sums."""

    def zero(self) -> None:
        """Forget the last step's gradients."""

    def before_micro_batch(self, last: bool) -> None:
        """Prepare the coming backward pass."""

    def finish(self) -> None:
        """Return once the sums are complete."""

    def unreached(self) -> int:
        """Return how many parameters this rank's passes did not reach, of those that `settle` looks at.

        It may be 0 where they are those of the step that was settled last: what no rank reached then has no gradient
        from here on, unless another rank has news and all of them settle.
        """

    def settle(self) -> None:
        """Take the gradients from parameters that no rank reached. All ranks call it where any missed one."""
