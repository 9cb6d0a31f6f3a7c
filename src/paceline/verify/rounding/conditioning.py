"""Conditioning: how far a unit in the last place of the weights moves what is computed from them.

No program can be nearer to another than that, since weights themselves are known to one unit in the last place. Where a
layout misses a tolerance, and only there, one device computes its numbers again from weights that are moved by so much.
What is off by no more than MARGIN times the movement is rounding; every other difference stays one. A program that
gives other numbers when the same is computed once more, such as one that reads memory nobody wrote, moves by itself: of
it no movement says anything, and nothing is rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof, Rounding
from paceline.verify.compare.difference import NAMES, Difference
from paceline.verify.compare.measures import number_differences, tensor_differences, turn_differences
from paceline.verify.compare.routing import as_losses
from paceline.verify.compare.tolerance import TOLERANCES
from paceline.verify.reference.steps import ReferenceStep

DRAWS = 8  # re-runs from moved weights; of fewer, the movement of a single number says too little
# Three times the largest part of the movement that right layouts took: 1.97, of 48 set-ups (tp, and cp gathered and in
# a ring, of 2 and 4; tp with cp, pp, dp_shard; three seeds; bf16, fp16). MeasuredHere by tests/verify/low/test_low.py.
MARGIN = 6.0
FEW_DRAWS = 2  # of them, enough for a first step in fp64, where chaos has not begun
FAR = 1e3  # times MARGIN times the movement: what is so much off needs no more draws
VERY_FAR = 1e6  # the same in later steps and in fewer bits, where a few draws may say too little, and more are costly
# The gradient norm of a step that moves by so many units in its last place is that of chaos: movements there have no
# typical size, and only fp64 says something of this step and those after it, at fp32's tolerances.
CHAOS = 2.0**20
EXACT = ("position", "samples", "initial", "weight", "lr")  # no rounding moves these

ReadTensors = Mapping[str, torch.Tensor]
Differing = tuple[str, str, int]  # quantity, name, step
Move = tuple[torch.dtype, int]  # weights move by a unit in the last place of a format, at random, by a seed
Made = TypeVar("Made")  # what one device computes


@dataclass(frozen=True)
class Narrowest:
    """The narrowest format that one device computes in, and which part of the model does, "" where it is all of it."""

    dtype: torch.dtype
    where: str = ""


@dataclass(frozen=True)
class Again:
    """How one device computes the same again. Rank 0 alone asks for it.

    `moved` returns how far its numbers are, after so many steps from weights moved with a seed, from what they were;
    `repeated` how far they are from these where no weight is moved; `narrowest` looks at the formats of the reference's
    model.
    """

    moved: Callable[[torch.dtype, int, int], Iterable[Difference]]
    narrowest: Callable[[], Narrowest]
    repeated: Callable[[int], Iterable[Difference]]


def computed_again(
    computed: Callable[[int, Move | None], Made],
    apart: Callable[[Made, Made], Iterable[Difference]],
    narrowest: Callable[[], Narrowest],
) -> Again:
    """Return how one device computes the same again.

    `computed` makes so many steps, from weights that were moved or not; `apart` says how far its numbers are from
    others. What was moved is held against what is computed anew, not against the reference: what is wrong there would
    count as movement.
    """
    unmoved = functools.cache(lambda made: computed(made, None))

    def moved(dtype: torch.dtype, seed: int, made: int) -> Iterable[Difference]:
        return apart(computed(made, (dtype, seed)), unmoved(made))

    def repeated(made: int) -> Iterable[Difference]:
        return apart(computed(made, None), unmoved(made))

    return Again(moved, narrowest, repeated)


@dataclass(frozen=True)
class Moved:
    """How far one device's numbers move, by the root of the mean square, and the first step that is chaotic."""

    narrowest: Narrowest
    by: Mapping[Differing, float]
    chaos: float  # infinity where no step is

    @classmethod
    def of(cls, narrowest: Narrowest, draws: Sequence[Iterable[Difference]]) -> Moved:
        """Return it of re-runs whose weights were moved in a format."""
        by, most = _root_mean_square(draws), CHAOS * torch.finfo(narrowest.dtype).eps
        chaotic = (at for (quantity, _, at), far in by.items() if quantity == "grad_norm" and not far <= most)
        return cls(narrowest, by, min(chaotic, default=math.inf))

    def allowed(self, d: Difference, precision: str) -> float:
        """Return how large a difference rounding explains."""
        # What is computed in a format is known to a unit in its last place, however little it moves.
        eps = torch.finfo(self.narrowest.dtype).eps
        near = MARGIN * max(self.by[_place(d)], eps) if _place(d) in self.by else 0.0
        if d.step < self.chaos:
            return near
        return math.inf if precision != "fp64" else max(near, _in_fp32(d.quantity))

    def explains(self, d: Difference, precision: str) -> bool:
        """Return whether a difference is no more than what rounding explains."""
        if math.isnan(d.relative) and d.step < self.chaos:
            return False
        return _may_be_rounding(d, precision) and not d.relative > self.allowed(d, precision)


@torch.no_grad()
def moved_by_one_ulp(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Move every weight of a model by up to one unit in the last place of `dtype`, at random, in place."""
    generator = torch.Generator().manual_seed(seed)
    eps = torch.finfo(dtype).eps
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            signs = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.add_(parameter * (signs * eps).to(parameter.dtype))


def steps_apart(
    ours: ReferenceStep, known: ReferenceStep, starts: tuple[ReadTensors, ReadTensors], step: int
) -> list[Difference]:
    """Return how far two steps of one device differ: in loss, norm, routers, and in how far each moved its weights."""
    world, layout = World(0, 1, 0, torch.device("cpu")), Layout()
    numbers = {"loss": ours.loss, "grad_norm": ours.grad_norm}
    here, there = starts
    weights = {name: (w.to(_widest(w)) - here[name]) + there[name] for name, w in ours.weights.items()}
    return [
        *number_differences(numbers, {name: getattr(known, name) for name in numbers}, step, world, known.reach),
        *(each for name in numbers for each in turn_differences(ours.turns, known.turns, step, world, name)),
        *tensor_differences("router", ours.router, known.router, step, world, layout),
        *as_losses(number_differences(ours.routing, known.routing, step, world)),
        *tensor_differences("gradients", ours.gradients, known.gradients, step, world, layout),
        *tensor_differences("weights", weights, known.weights, step, world, layout, there),
        *tensor_differences("buffers", ours.buffers, known.buffers, step, world, layout, there),
        *tensor_differences("moments", ours.moments, known.moments, step, world, layout),
    ]


def _widest(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def beyond_tolerance(found: Iterable[Difference], precision: str) -> list[Difference]:
    """Return the differences that are too large, whatever they come from."""
    return [d for d in found if not d.relative <= d.tolerance_in(precision)]


def beyond_rounding(
    found: Sequence[Difference], precision: str, again: Again | None, world: World
) -> tuple[list[Difference], Rounding | None]:
    """Return the differences that rounding does not explain, and the first that it does. Every rank calls it.

    `found` is the same on all ranks; `again` is rank 0's.
    """
    wrong = beyond_tolerance(found, precision)
    if not wrong or not _may_be_rounding(wrong[0], precision):
        return wrong, None
    told = world.share(_movement(wrong, again, precision) if again is not None else None)
    if told is None:
        return wrong, None
    if isinstance(told, Difference):
        return [told, *(dataclasses.replace(d, is_reproducible=False) for d in wrong)], None
    left = [d for d in wrong if not told.explains(d, precision)]
    if left:
        return left, None
    first, narrowest, chaos = wrong[0], told.narrowest, told.chaos
    return [], Rounding(
        quantity=first.quantity,
        name=first.name,
        step=first.step,
        dtype=precision,
        relative=first.relative,
        tolerance=first.tolerance_in(precision),
        moved=told.by[_place(first)],
        of_bound=max((d.relative / told.allowed(d, precision) for d in wrong if d.step < chaos), default=0.0),
        chaos=None if chaos == math.inf else int(chaos),
        places=len(wrong),
        format=NAMES.get(narrowest.dtype, str(narrowest.dtype).removeprefix("torch.")),
        where=narrowest.where,
        coarse=any(d.relative > _in_fp32(d.quantity) for d in wrong),
    )


def settled(found: CheckProof, rounding: Rounding | None, exact: Callable[[], CheckProof]) -> CheckProof:
    """Return what a comparison has found, once it is known which of its differences are rounding alone.

    `rounding` is what was suspected of being rounding; `exact` makes the same comparison in fp64. What fp32 misses by
    rounding must be equal in fp64, or what was found there counts. What rounding hides so much of that fp32's
    tolerances are missed is `ill_conditioned`, with the differences in fp64.
    """
    if rounding is None:
        return found
    if found.dtype == "fp64":
        known = dataclasses.replace(rounding, fp64=found.differences)
        return dataclasses.replace(found, ill_conditioned=known if rounding.coarse or rounding.where else None)
    again = exact()
    seconds = found.seconds + again.seconds
    if not again.equal:
        return dataclasses.replace(again, seconds=seconds)
    known = dataclasses.replace(rounding, fp64=again.differences)
    return dataclasses.replace(found, seconds=seconds, ill_conditioned=known)


def _movement(wrong: Sequence[Difference], again: Again, precision: str) -> Moved | Difference | None:
    """Return how far one device's numbers move, in the steps that decide; None where the first moves far less.

    A difference is what it returns of a device whose numbers are others when it computes the same once more.
    """
    narrowest, first = again.narrowest(), wrong[0]
    steps, last = max(1, first.step), max(d.step for d in wrong)
    is_early = first.step <= 1 and narrowest.dtype == torch.float64

    def drawn(seeds: range, steps: int) -> list[list[Difference]]:
        return [list(again.moved(narrowest.dtype, seed, steps)) for seed in seeds]

    def is_far(by: float, draws: Sequence[Iterable[Difference]]) -> bool:
        size = _root_mean_square(draws).get(_place(first), 0.0)
        return bool(size) and first.relative > by * MARGIN * size

    draws = drawn(range(1, FEW_DRAWS + 1), steps)
    if is_far(FAR if is_early else VERY_FAR, draws):
        return None
    if not is_early:
        draws += drawn(range(FEW_DRAWS + 1, DRAWS + 1), steps)
        if is_far(FAR, draws):
            return None
    # After the draws, so that memory which nobody wrote holds something else by now.
    itself = [d for d in beyond_tolerance(again.repeated(steps), precision) if not _is_alike(d)]
    if itself:
        return dataclasses.replace(itself[0], is_reproducible=False)
    found = Moved.of(narrowest, draws)
    # What the first steps leave unexplained no movement of later ones explains.
    first_ones = itertools.takewhile(lambda d: d.step <= steps, wrong)
    if len(draws) == DRAWS and (last <= steps or not all(found.explains(d, precision) for d in first_ones)):
        return found
    return Moved.of(narrowest, drawn(range(1, DRAWS + 1), max(1, last)))


def _root_mean_square(draws: Sequence[Iterable[Difference]]) -> dict[Differing, float]:
    sizes: dict[Differing, list[float]] = {}
    for draw in draws:
        for difference in draw:
            sizes.setdefault(_place(difference), []).append(difference.relative)
    return {place: math.hypot(*found) / math.sqrt(len(draws)) for place, found in sizes.items()}


def _is_alike(difference: Difference) -> bool:
    """Return whether both numbers are the same one, infinite or none at all: they have no distance."""
    ours, known = difference.ours, difference.reference
    return ours == known or (math.isnan(ours) and math.isnan(known))


def _in_fp32(quantity: str) -> float:
    """Return fp32's tolerance of a quantity; that of a whole batch is one of losses and gradients in fp64 alone."""
    return TOLERANCES["loss" if quantity == "whole batch" else quantity]["fp32"]


def _place(difference: Difference) -> Differing:
    return difference.quantity, difference.name, difference.step


def _may_be_rounding(difference: Difference, precision: str) -> bool:
    """Return whether rounding can be why. An overflow (NaN) is only in chaos, below fp64; a lack (infinity) never."""
    is_number = math.isfinite(difference.relative) or (math.isnan(difference.relative) and precision != "fp64")
    return difference.quantity not in EXACT and is_number
