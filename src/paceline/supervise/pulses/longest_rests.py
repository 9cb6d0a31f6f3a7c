"""How long ranks have been at rest in a phase of late, and gone on: a further rest may be as long. Torch-free.

A rest counts until as many steps have followed as had been made before it, and for `FEWEST_STEPS` at least. What comes
back every 5,000 steps (an evaluation, a checkpoint, a collection) was in step 5,000 first, which counts up to step
10,000, and there it comes back. What was once, as a first compilation that peers have waited for, is forgotten: one in
step 3 counts up to step 1,003. Steps are those of the run, and not of a start.
"""

from __future__ import annotations

from collections import defaultdict, deque

FEWEST_STEPS = 1_000  # more than lie between two collections of garbage, and in most runs between two checkpoints


class LongestRests:
    """The longest rests of each phase, of the ranks of one machine: the longest that counts, and those that follow it.

    A rest that a longer one follows says nothing more, so of each phase a few are kept, ever shorter and ever later.
    """

    def __init__(self) -> None:
        self._kept: dict[str, deque[tuple[int, float]]] = defaultdict(deque)  # by phase: step, seconds

    def add(self, phase: str, step: int, seconds: float) -> None:
        """Note that a rank was at rest for so long in a phase of a step, and has gone on."""
        if seconds <= 0.0:
            return
        kept = self._kept[phase]
        while kept and kept[-1][1] <= seconds:
            kept.pop()
        kept.append((step, seconds))

    def longest(self, phase: str, step: int) -> float:
        """Return the longest rest that counts for a phase of a step; 0 where none does."""
        kept = self._kept.get(phase)
        while kept and step > counts_until(kept[0][0]):
            kept.popleft()
        return kept[0][1] if kept else 0.0


def counts_until(step: int) -> int:
    """Return the last step for which a rest in `step` counts."""
    return step + max(step, FEWEST_STEPS)
