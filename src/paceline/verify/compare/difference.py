"""Difference: how far one number or tensor of a layout is from the reference. Plain data, found on all ranks alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.verify.compare.tolerance import FLOOR, tolerance

NAMES = {torch.float32: "fp32", torch.float64: "fp64"}
# (relative difference, ratio of norms, our element that differs most, the reference's)
_Measure = tuple[float, float, float, float]
_ELSEWHERE: _Measure = (0.0, 1.0, 0.0, 0.0)  # of a tensor that another pipeline stage holds


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

    @property
    def is_scaled(self) -> bool:
        """Whether ours is the reference times one factor, and nothing else."""
        off = abs(self.ratio - 1)
        return off > 1e-6 and abs(self.relative - off) < 1e-3 * off


@torch.no_grad()
def tensor_differences(
    quantity: str,
    ours: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    step: int,
    world: World,
    layout: Layout,
    start: Mapping[str, torch.Tensor] | None = None,
) -> list[Difference]:
    """Return one Difference per tensor, from the rank where it is largest. Every rank calls it.

    With pipeline stages a rank holds some of the tensors; each must be on one rank at least. With `start`, what the
    tensors were before the first step, their changes since then are compared, relative to the size of the change.
    """
    total = math.sqrt(sum(float(wide(tensor).square().sum()) for tensor in reference.values()))
    local: list[_Measure] = []
    held = set(ours)
    if layout.pp > 1:
        held = held.union(*world.gather(held))
    for name, expected in reference.items():
        if name not in ours and name in held:
            local.append(_ELSEWHERE)
            continue
        if name not in ours:
            local.append((math.inf, 0.0, math.nan, float(expected.abs().max()) if expected.numel() else 0.0))
            continue
        mine, part = map(wide, _parts(ours[name], expected))
        stored = 0.0
        if start is not None and name in start and mine.shape == part.shape:
            before = wide(_parts(ours[name], start[name])[1])
            stored = step * _stored(quantity, expected.dtype) * float(part.norm())
            mine, part = mine - before, part - before
        local.append(_measure(mine, part, FLOOR * total, stored))
    extra = [name for name in sorted(held) if name not in reference]
    local += [(math.inf, math.inf, math.nan, math.nan)] * len(extra)
    # Ranks at the same place of every axis but dp_replicate hold copies of the same part.
    places = [{**layout.coordinates(rank), "dp_replicate": 0} for rank in range(world.size)]
    return _worst(quantity, [*reference, *extra], local, step, world, [places.index(place) for place in places])


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in fp64, real and imaginary parts of a complex one side by side: a cast would drop these."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a copy of a tensor times a factor; of a DTensor by its part, which takes no dispatch."""
    if not isinstance(tensor, DTensor):
        return tensor * factor
    part, mesh, placements = tensor.to_local() * factor, tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def number_differences(
    ours: Mapping[str, float], reference: Mapping[str, float], step: int, world: World
) -> list[Difference]:
    """Return one Difference per number that every rank reports; the name is the quantity too. Every rank calls it."""
    local = []
    for name, expected in reference.items():
        relative = abs(ours[name] - expected) / max(abs(expected), 1e-300)
        local.append((relative, ours[name] / expected if expected else math.nan, ours[name], expected))
    everywhere = [0] * world.size  # every rank reports the same number
    return _worst("", list(reference), local, step, world, everywhere)


def turn_differences(
    ours: Mapping[str, object], reference: Mapping[str, object], step: int, world: World, quantity: str
) -> list[Difference]:
    """Return how far a number of each turn of a step is from the reference's, by turn; NaN for a turn without one."""
    found = []
    for name, turn in reference.items():
        mine = {quantity: float(getattr(ours.get(name), quantity, math.nan))}
        (difference,) = number_differences(mine, {quantity: getattr(turn, quantity)}, step, world)
        found.append(dataclasses.replace(difference, name=f"{quantity} of {name}"))
    return found


def sample_differences(
    ours: list[tuple[int, list[int]]], reference: list[int], first: int, step: int, world: World, layout: Layout
) -> Difference:
    """Return how far the sample ids that the ranks read are from the reference's. Every rank calls it.

    `ours` is this rank's list of (position of the first row, ids); `reference` holds the ids of the positions from
    `first` on. Ranks that share samples must read the same ones, which count once. The relative difference is the part
    of positions that were not read, read twice, or read another sample.
    """
    read: dict[int, list[tuple[int, int]]] = {}
    everyone = world.gather(ours)
    # From coordinates, not from `data_rank`: a mistake there must not hide itself.
    parts = [(place["dp_replicate"], place["dp_shard"]) for place in map(layout.coordinates, range(world.size))]
    for rank, runs in enumerate(everyone):
        owner = parts.index(parts[rank])
        if owner != rank and runs == everyone[owner]:
            continue  # ranks that share samples must read the same ones, which count once
        for position, ids in runs:
            for offset, sample in enumerate(ids):
                read.setdefault(position + offset, []).append((rank, sample))
    wanted = {first + offset: sample for offset, sample in enumerate(reference)}
    wrong = [at for at in sorted({*wanted, *read}) if [s for _, s in read.get(at, [])] != [wanted.get(at)]]
    count = sum(len(found) for found in read.values())
    if not wrong:
        return Difference("samples", "all", step, 0, 0.0, 1.0, float(count), float(count))
    found = read.get(wrong[0], [])
    rank, sample = found[-1] if found else (0, -1)
    return Difference(
        "samples", f"position {wrong[0]}", step, rank, len(wrong) / len(wanted), count / len(wanted),
        float(sample), float(wanted.get(wrong[0], -1)), copies_agree=len(found) < 2,
    )  # fmt: skip


def _worst(
    quantity: str,
    names: list[str],
    local: list[_Measure],
    step: int,
    world: World,
    copy_of: list[int],
) -> list[Difference]:
    """Return the Differences from the ranks where they are largest, given this rank's measures.

    `copy_of` holds for each rank the lowest one whose numbers it must share.
    """
    ranks = world.gather(local)
    found = []
    for index, name in enumerate(names):
        rank = max(range(len(ranks)), key=lambda r: (_order(ranks[r][index][0]), -r))
        # Copies of the same part that went through the same arithmetic are equal to the last bit.
        copies_agree = all(repr(ranks[r][index]) == repr(ranks[copy][index]) for r, copy in enumerate(copy_of))
        relative, ratio, value, expected = ranks[rank][index]
        found.append(
            Difference(quantity or name, name, step, rank, relative, ratio, value, expected, copies_agree=copies_agree)
        )
    return found


def _parts(ours: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a tensor and the same part of the reference."""
    if not isinstance(ours, DTensor):
        return ours, reference
    if ours.shape != reference.shape:
        return ours.to_local(), reference
    spread = distribute_tensor(reference.to(ours.device), ours.device_mesh, ours.placements, src_data_rank=None)
    return ours.to_local(), spread.to_local()


def _measure(ours: torch.Tensor, reference: torch.Tensor, floor: float, stored: float = 0.0) -> _Measure:
    """Return (relative difference, ratio of norms, our element that differs most, the reference's).

    A norm counts as at least `floor`, and `stored` is added to it.
    """
    if ours.shape != reference.shape:
        return math.inf, math.nan, math.nan, math.nan
    if not ours.numel():
        return 0.0, 1.0, 0.0, 0.0
    difference = (ours - reference).flatten()
    size = float(reference.norm())
    at = int(difference.abs().argmax())
    norm = float(difference.norm())
    relative = norm / max(max(size, floor) + stored, 1e-300)
    ratio = float(ours.norm()) / size if size else (math.nan if norm else 1.0)
    return relative, ratio, float(ours.flatten()[at]), float(reference.flatten()[at])


def _stored(quantity: str, dtype: torch.dtype) -> float:
    """Return a unit in the last place over the tolerance of a quantity: what that unit counts as of a norm."""
    return torch.finfo(dtype).eps / tolerance(quantity, NAMES[dtype]) if dtype in NAMES else 0.0


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value
