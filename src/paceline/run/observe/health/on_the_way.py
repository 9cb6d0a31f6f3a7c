"""A measurement on its way from the device to the host: which of its numbers is which, and what blocks were like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.run.loop.numbers import NumbersOnTheWay

OUTPUT = "output"  # of the model: its logits, where the model gives them
NO_LOGITS = "the model gives no logits: it adds up the loss itself, or part by part"
SUMS, LARGEST = 5, 2  # rows of one number a block: of sums over the ranks, and of largest values


@dataclass(frozen=True)
class MeasuredHealth:
    """What one step's blocks were like, on rank 0; elsewhere without values."""

    step: int
    values: Mapping[str, Mapping[str, float]]
    absent: Mapping[str, str]
    seconds: float  # of this rank's host


@dataclass(frozen=True)
class HealthOnTheWay:
    """The numbers of one step's blocks, which the device still works on, and what they are numbers of."""

    step: int
    numbers: NumbersOnTheWay | None  # on rank 0
    blocks: Sequence[str]
    copied: frozenset[int]  # the blocks whose weights were kept through the update, by their place
    copies: int  # how many times the ranks hold the model, each making its updates by itself
    correction: float  # the factor of the gradients
    silent_blocks: Sequence[int]  # for each activation function with units that may give nothing its block's place
    widths: Sequence[int]  # how many units it has on a rank
    parts: int  # how many ranks share its units
    absent: Mapping[str, str]
    seconds: float

    def arrived(self) -> MeasuredHealth:
        """Return what the blocks were like, once the numbers are here: after the next step's nobody waits for them."""
        if self.numbers is None:
            return MeasuredHealth(self.step, {}, self.absent, self.seconds)
        values = self._by_block(self.numbers.arrived())
        absent = self.absent if OUTPUT in values else {"logits": NO_LOGITS, **self.absent}
        return MeasuredHealth(self.step, values, absent, self.seconds)

    def _by_block(self, numbers: Sequence[float]) -> dict[str, dict[str, float]]:
        """Return the numbers of each block by name."""
        count = len(self.blocks)
        behind = (SUMS + LARGEST) * count
        rows = [numbers[start : start + count] for start in range(0, behind, count)]
        logit, silent = numbers[behind], self._dead_shares(numbers[behind + 1 :])
        found: dict[str, dict[str, float]] = {}
        for at, name in enumerate(self.blocks):
            gradient, weight, update, squares, values, most, score = (row[at] for row in rows)
            own: dict[str, float] = {}
            if weight > 0 or gradient != 0:  # a head that shares its weights has none of its own
                own["grad_norm"] = math.sqrt(gradient / self.copies) * self.correction
                own["weight_norm"] = math.sqrt(weight / self.copies)
            if at in self.copied and weight > 0:
                own["update_ratio"] = math.sqrt(update / weight)
            if values:
                own |= {"activation_rms": math.sqrt(squares / values), "activation_max": most}
            if score:
                own["attention_max"] = score
            if logit and name == OUTPUT:
                own["logit_max"] = logit
            if at in silent:
                own["dead_share"] = silent[at]
            found |= {name: own} if own else {}
        return found

    def _dead_shares(self, reached: Sequence[float]) -> dict[int, float]:
        """Return by block the share of the units behind its activation functions that gave nothing."""
        dead, whole = dict[int, int](), dict[int, int]()
        start, seen = 0, reached[len(reached) - len(self.widths) :]
        for at, width, found in zip(self.silent_blocks, self.widths, seen, strict=True):
            units = reached[start : start + width * self.parts]
            start += len(units)
            if width and found <= width:  # more are left out of this measurement
                dead[at] = dead.get(at, 0) + sum(unit == 0 for unit in units)
                whole[at] = whole.get(at, 0) + len(units)
        return {at: dead[at] / whole[at] for at in whole}
