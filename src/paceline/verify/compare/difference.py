"""Difference: how far one number or tensor of a layout is from the reference. Plain data, found on all ranks alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from paceline.run.process.world import World
from paceline.verify.compare.tolerance import REACH, tolerance

DifferenceKind: TypeAlias = Literal["", "exchange", "choice"]
NAMES = {torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Difference:
    """How far one tensor or number is from the reference, on the rank where it is farthest."""

    quantity: str
    name: str
    step: int  # 0 before the first
    rank: int
    relative: float
    ratio: float  # size of ours over size of the reference's; an axis degree here means a scale bug
    ours: float  # the element that differs most
    reference: float
    copies_agree: bool = True  # whether ranks that hold copies of the same part hold the same numbers
    in_journal: bool = False  # whether it is what a run's journal says that differs, not what the run computes
    of_routers: bool = False  # whether it is told of routers, and compared as a loss is
    kind: DifferenceKind = ""  # what else its name tells: a format that travels, a choice of experts
    is_reproducible: bool = True  # whether one device gives the same number when it computes the same once more

    @property
    def is_scaled(self) -> bool:
        """Whether ours is the reference times one factor, and nothing else."""
        off = abs(self.ratio - 1)
        return off > 1e-6 and abs(self.relative - off) < 1e-3 * off

    def tolerance_in(self, precision: str) -> float:
        """Return the largest relative difference that is none.

        Items are counted without an error; fractions of them are added up, and their sum is rounded as a loss is.
        """
        is_counted = float(self.ours).is_integer() and float(self.reference).is_integer()
        return tolerance(self.quantity if self.quantity != "weight" or is_counted else "loss", precision)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in fp64, real and imaginary parts of a complex one side by side: a cast would drop these."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def times(ratio: float) -> str:
    """Return a ratio in words: "1.5 times", or how far it is from one where its first digits do not say so."""
    off = ratio - 1
    if math.isfinite(off) and 0 < abs(off) < 1e-3:
        return f"1 {'+' if off > 0 else '-'} {abs(off):.1e} times"
    return f"{ratio:.4g} times"


def reach_of(grad_norm: float, weights: Iterable[torch.Tensor]) -> float:
    """Return what a loss counts as at least: a part of what it would change by with weights of twice their size.

    That of advantages that sum to zero is nothing but rounding, of numbers that are as large as any.
    """
    norms = [wide(weight.detach()).norm() for weight in weights]
    return REACH * grad_norm * float(torch.stack(norms).norm()) if norms and math.isfinite(grad_norm) else 0.0


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a copy of a tensor times a factor; of a DTensor by its part, which takes no dispatch."""
    if not isinstance(tensor, DTensor):
        return tensor * factor
    part, mesh, placements = tensor.to_local() * factor, tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


@dataclass(frozen=True)
class MeasuredHere:
    """What this rank has measured, and what the measures of all ranks say: a difference for each thing measured."""

    mine: object  # plain data, that travels
    of_all: Callable[[list[Any]], list[Difference]]  # given every rank's, in rank order

    def told_as(self, *, quantity: str = "", name: str = "", of_routers: bool = False) -> MeasuredHere:
        """Return the same measures whose differences have another name or quantity, or are of routers."""

        def of_all(ranks: list[Any]) -> list[Difference]:
            return [
                dataclasses.replace(
                    found, quantity=quantity or found.quantity, name=name or found.name, of_routers=of_routers
                )
                for found in self.of_all(ranks)
            ]

        return MeasuredHere(self.mine, of_all)


def together(measured: Sequence[MeasuredHere], world: World) -> list[Difference]:
    """Return the differences of several measurements, in their order, by one collective. Every rank calls it."""
    everyone = world.gather([one.mine for one in measured])
    return [found for at, one in enumerate(measured) for found in one.of_all([mine[at] for mine in everyone])]
