"""Buffers of a loop's model: alike on all ranks when the proof begins, they must be when it ends.

A running mean that evaluations alone use shows in no loss and no gradient. Where each rank moves it by its own rows,
what is evaluated or saved depends on the rank.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.run.process.world import World
from paceline.spec.proof.records import FirstDifference
from paceline.verify.compare.difference import wide
from paceline.verify.compare.tolerance import tolerance
from paceline.verify.loops.unwrapped import inner_of

FAMILY = "buffers of a rank"
LIKELY = (
    "every rank moves buffer {name} by its own rows: no loss and no gradient shows it, and what is evaluated or saved"
    " depends on the rank. Sums over all ranks in the step, or a broadcast from one of them, keep it alike"
)

Sizes = dict[str, tuple[float, float]]  # sum and norm of every buffer that is whole on a rank


class BuffersOfRanks:
    """Watches the buffers of a model on all ranks."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world
        self._start = self._of_all()

    def apart(self, dtype: str, steps: int) -> FirstDifference | None:
        """Return what says that ranks have other values in a buffer than at first they had. Every rank calls it."""
        now = self._of_all()
        for name in self._start[0]:
            if self._farthest(self._start, name)[1] > 0:  # a rank has its own of it by design
                continue
            rank, relative = self._farthest(now, name)
            if relative > tolerance("buffers", dtype):
                ours, reference = now[rank].get(name, (math.nan, 0.0))[0], now[0].get(name, (math.nan, 0.0))[0]
                return FirstDifference(
                    quantity="buffers", name=name, step=steps, rank=rank, relative=relative,
                    ratio=ours / reference if reference else math.nan, ours=ours, reference=reference,
                    copies_agree=False, tensors=(name,), tensors_in_all=1, family=FAMILY,
                    likely=LIKELY.format(name=name),
                )  # fmt: skip
        return None

    def _of_all(self) -> list[Sizes]:
        held = inner_of(self._model).named_buffers()
        sizes = {name: _sizes(buffer) for name, buffer in held if not isinstance(buffer, DTensor)}
        return self._world.gather(sizes)

    def _farthest(self, ranks: list[Sizes], name: str) -> tuple[int, float]:
        """Return the rank whose buffer is farthest from rank 0's, and how far, relative to its norm."""
        total, norm = ranks[0].get(name, (0.0, 0.0))
        far = []
        for rank in ranks:
            other, length = rank.get(name, (math.inf, math.inf))
            off = max(abs(other - total), abs(length - norm))
            far.append(0.0 if (other, length) == (total, norm) else off / max(norm, length, 1e-300))
        found = [math.inf if math.isnan(each) else each for each in far]
        return max(range(len(found)), key=found.__getitem__), max(found)


def _sizes(buffer: torch.Tensor) -> tuple[float, float]:
    values = wide(buffer.detach()).nan_to_num()
    return float(values.sum()), float(values.norm())
