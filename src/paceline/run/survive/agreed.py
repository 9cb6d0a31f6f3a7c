"""The last state that all ranks have compared, as a rank remembers it: later states are held against that state.

Copies of a weight are compared between two steps. A bit that flips afterwards is found by the next comparison, unless
the copy is lost before; then a rank that is left still knows which bits it had when all agreed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from paceline.checkpoint import Snapshot
from paceline.checkpoint.fingerprint import PartSums, parts_held
from paceline.supervise.again.held_state import AGREED, DUE, OPEN, HeldState


class Agreed:
    """Remembers the sums of a rank's part of the state from the last comparison, of one world."""

    def __init__(self, remembers: bool) -> None:
        """`remembers` is False where no rank can go on from what it holds: the sums are then of no use."""
        self.remembers = remembers
        self._step, self._sums = 0, PartSums()

    def after(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note that the state after a step is what all ranks agree on, or what a checked checkpoint has held."""
        self._step, self._sums = step, parts_held(tensors) if self.remembers else {}

    def held(self, taken: Snapshot, is_due: bool) -> HeldState:
        """Return what is told of a snapshot, which is of the step that the rank has come to."""
        sums: PartSums = {}
        for part in taken.values:
            if part.fingerprint is not None:
                sums.setdefault(part.name, {})[part.box] = part.fingerprint
        known = taken.step == self._step
        changed = next((name for name, parts in self._sums.items() if sums.get(name, {}) != parts), "") if known else ""
        if changed:
            return HeldState(agreed_step=self._step, changed=f"'{changed}' after step {taken.step}")
        return HeldState(taken.step, _digest(sums), AGREED if known else DUE if is_due else OPEN, self._step)


def _digest(sums: PartSums) -> str:
    told = sorted((name, sorted(parts.items())) for name, parts in sums.items())
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()
