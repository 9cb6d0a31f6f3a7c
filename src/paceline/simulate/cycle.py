"""Cycle: what repeats while a job runs undisturbed: work, a copy in memory, work, a checkpoint.

Everything here is closed form in the seconds since the job started to run, so that weeks between two failures cost no
more than minutes. Work is in seconds of computing, at whatever speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROUNDING = 1e-9  # relative: an instant that floating point puts just before a border counts as on it


@dataclass(frozen=True)
class Cycle:
    """`copies` blocks of `block` seconds of work, each followed by `copy_stall`, the last also by `store_stall`.

    What the last block stores is safe `write` seconds after its stall, while work goes on; `write` must not be longer
    than a cycle. Without copies in memory there is one block a cycle and `copy_stall` is 0.
    """

    block: float
    copies: int
    copy_stall: float
    store_stall: float
    write: float

    @property
    def work(self) -> float:
        """Seconds of work in a cycle."""
        return self.block * self.copies

    @property
    def seconds(self) -> float:
        """Seconds of a cycle, stalls included."""
        return self.copies * (self.block + self.copy_stall) + self.store_stall

    def work_at(self, elapsed: float) -> float:
        """Return the seconds of work done so many seconds after the start."""
        cycles, rest = self._cycles(elapsed)
        step = self.block + self.copy_stall
        blocks = min(math.floor(rest / step + ROUNDING), self.copies - 1)
        begun = rest - blocks * step if blocks else rest
        return self._work(cycles, blocks) + max(0.0, min(begun, self.block))

    def copied_at(self, elapsed: float) -> float:
        """Return the seconds of work whose copy in memory is complete."""
        cycles, rest = self._cycles(elapsed)
        blocks = min(math.floor(rest / (self.block + self.copy_stall) + ROUNDING), self.copies)
        return self._work(cycles, blocks)

    def stored_at(self, elapsed: float) -> float:
        """Return the seconds of work that a checkpoint in storage holds."""
        return self._work(self._cycles(elapsed - self.write)[0]) if elapsed > self.write else 0.0

    def elapsed_for(self, work: float) -> float:
        """Return when so much work is done: no stall follows the last of it."""
        blocks = max(0, math.ceil(work / self.block - ROUNDING) - 1) if math.isfinite(self.block) else 0
        return work + blocks * self.copy_stall + blocks // self.copies * self.store_stall

    def _work(self, cycles: int, blocks: int = 0) -> float:
        """Return the seconds of work in so many cycles and blocks, which may be endless ones."""
        return (cycles * self.copies + blocks) * self.block if cycles or blocks else 0.0

    def _cycles(self, elapsed: float) -> tuple[int, float]:
        """Return the whole cycles in so many seconds, and what is left."""
        if not math.isfinite(self.seconds):
            return 0, elapsed
        cycles = math.floor(elapsed / self.seconds + ROUNDING)
        return cycles, max(0.0, elapsed - cycles * self.seconds)
