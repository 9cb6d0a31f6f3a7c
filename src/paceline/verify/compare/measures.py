"""Measures: how far tensors, numbers and samples of a layout are from the reference's, on each rank and over all."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.verify.compare.difference import NAMES, Difference, MeasuredHere, together, wide
from paceline.verify.compare.tolerance import FLOOR, tolerance

ReadTensors = Mapping[str, torch.Tensor]
LOSSES = ("loss", "evaluation")  # numbers that may cancel to nothing
# (relative difference, ratio of norms, our element that differs most, the reference's)
_Measure = tuple[float, float, float, float]
_ELSEWHERE: _Measure = (0.0, 1.0, 0.0, 0.0)  # of a tensor that another pipeline stage holds


def tensor_differences(
    quantity: str,
    ours: ReadTensors,
    reference: ReadTensors,
    step: int,
    world: World,
    layout: Layout,
    start: ReadTensors | None = None,
) -> list[Difference]:
    """Return what `measured_tensors` says once all ranks have it. Every rank calls it."""
    return together([measured_tensors(quantity, ours, reference, step, layout, start)], world)


@torch.no_grad()
def measured_tensors(
    quantity: str,
    ours: ReadTensors,
    reference: ReadTensors,
    step: int,
    layout: Layout,
    start: ReadTensors | None = None,
) -> MeasuredHere:
    """Return this rank's measures of tensors: one Difference per tensor, from the rank where it is largest.

    With pipeline stages a rank holds some of the tensors; each must be on one rank at least. `start` is what the
    tensors were before the first step: the changes of weights since then are compared, relative to the size of the
    change.
    """
    floors = _floors(quantity, reference, start or {})
    mine: dict[str, _Measure] = {}
    for name, expected in reference.items():
        if name not in ours:
            continue
        own, part = map(wide, _parts(ours[name], expected))
        stored = 0.0
        if quantity == "weights" and start is not None and name in start and own.shape == part.shape:
            before = wide(_parts(ours[name], start[name])[1])
            stored = step * _stored(quantity, expected.dtype) * math.sqrt(_square(part))
            own, part = own - before, part - before
        mine[name] = _measure(own, part, floors[_kind(quantity, name)], stored)
    extra = [name for name in ours if name not in reference]

    def of_all(ranks: list[tuple[dict[str, _Measure], list[str]]]) -> list[Difference]:
        extras = sorted({name for _, names in ranks for name in names})
        columns = []
        for name, expected in reference.items():
            largest = float(expected.abs().max()) if expected.numel() and not all(name in m for m, _ in ranks) else 0.0
            elsewhere = layout.pp > 1 and any(name in measures for measures, _ in ranks)
            lacking = _ELSEWHERE if elsewhere else (math.inf, 0.0, math.nan, largest)
            columns.append([measures.get(name, lacking) for measures, _ in ranks])
        columns += [[(math.inf, math.inf, math.nan, math.nan)] * len(ranks)] * len(extras)
        # Ranks at the same place of every axis but dp_replicate hold copies of the same part.
        places = [{**layout.coordinates(rank), "dp_replicate": 0} for rank in range(len(ranks))]
        copy_of = [places.index(place) for place in places]
        return _worst(quantity, [*reference, *extras], columns, step, copy_of)

    return MeasuredHere((mine, extra), of_all)


def number_differences(
    ours: Mapping[str, float], reference: Mapping[str, float], step: int, world: World, reach: float = 0.0
) -> list[Difference]:
    """Return what `measured_numbers` says once all ranks have it. Every rank calls it."""
    return together([measured_numbers(ours, reference, step, reach)], world)


def measured_numbers(
    ours: Mapping[str, float], reference: Mapping[str, float], step: int, reach: float = 0.0
) -> MeasuredHere:
    """Return this rank's measures of numbers that every rank reports; the name is the quantity too.

    `reach` is what a loss counts as at least (`reach_of`), that of an evaluation too.
    """
    local = []
    for name, expected in reference.items():
        relative = abs(ours[name] - expected) / max(abs(expected), reach if name in LOSSES else 0.0, 1e-300)
        local.append((relative, ours[name] / expected if expected else math.nan, ours[name], expected))

    def of_all(ranks: list[list[_Measure]]) -> list[Difference]:
        columns = [[measures[at] for measures in ranks] for at in range(len(local))]
        return _worst("", list(reference), columns, step, [0] * len(ranks))

    return MeasuredHere(local, of_all)


def turn_differences(
    ours: Mapping[str, object], reference: Mapping[str, object], step: int, world: World, quantity: str
) -> list[Difference]:
    """Return what `measured_turns` says once all ranks have it. Every rank calls it."""
    return together(measured_turns(ours, reference, step, quantity), world) if reference else []


def measured_turns(
    ours: Mapping[str, object], reference: Mapping[str, object], step: int, quantity: str
) -> list[MeasuredHere]:
    """Return how far a number of each turn of a step is from the reference's, by turn; NaN for a turn without one."""

    def of_turn(name: str, turn: object) -> MeasuredHere:
        number = {quantity: float(getattr(ours.get(name), quantity, math.nan))}
        measured = measured_numbers(number, {quantity: getattr(turn, quantity)}, step, getattr(turn, "reach", 0.0))
        return measured.told_as(name=f"{quantity} of {name}")

    return [of_turn(name, turn) for name, turn in reference.items()]


def sample_differences(
    ours: list[tuple[int, list[int]]], reference: list[int], first: int, step: int, world: World, layout: Layout
) -> Difference:
    """Return what `measured_samples` says once all ranks have it. Every rank calls it."""
    (found,) = together([measured_samples(ours, reference, first, step, layout)], world)
    return found


def measured_samples(
    ours: list[tuple[int, list[int]]], reference: list[int], first: int, step: int, layout: Layout
) -> MeasuredHere:
    """Return how far the sample ids that the ranks read are from the reference's: one difference.

    `ours` is this rank's list of (position of the first row, ids); `reference` holds the ids of the positions from
    `first` on. Ranks that share samples must read the same ones, which count once. The relative difference is the part
    of positions that were not read, read twice, or read another sample.
    """
    return MeasuredHere(ours, lambda everyone: [_samples_apart(everyone, reference, first, step, layout)])


def _samples_apart(
    everyone: list[list[tuple[int, list[int]]]], reference: list[int], first: int, step: int, layout: Layout
) -> Difference:
    read: dict[int, list[tuple[int, int]]] = {}
    # From coordinates, not from `data_rank`: a mistake there must not hide itself.
    parts = [(place["dp_replicate"], place["dp_shard"]) for place in map(layout.coordinates, range(len(everyone)))]
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
    quantity: str, names: list[str], columns: list[list[_Measure]], step: int, copy_of: list[int]
) -> list[Difference]:
    """Return the Differences from the ranks where they are largest, given every rank's measure of each name.

    `copy_of` holds for each rank the lowest one whose numbers it must share.
    """
    found = []
    for name, ranks in zip(names, columns, strict=True):
        rank = max(range(len(ranks)), key=lambda r: (_order(ranks[r][0]), -r))
        # Copies of the same part that went through the same arithmetic are equal to the last bit.
        copies_agree = all(repr(ranks[r]) == repr(ranks[copy]) for r, copy in enumerate(copy_of) if r != copy)
        relative, ratio, value, expected = ranks[rank]
        found.append(
            Difference(quantity or name, name, step, rank, relative, ratio, value, expected, copies_agree=copies_agree)
        )
    return found


def _floors(quantity: str, reference: ReadTensors, start: ReadTensors) -> dict[str, float]:
    """Return what a tensor's norm counts as at least, by its kind.

    Second moments are squares of gradients: beside first ones, or counts of updates, they are nothing.
    """
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in reference.items():
        kinds.setdefault(_kind(quantity, name), {})[name] = tensor
    return {kind: _floor(alike, start) for kind, alike in kinds.items()}


def _kind(quantity: str, name: str) -> str:
    """Return what a tensor is compared among: all of a quantity, or the moments of one key, `PARAMETER.KEY`."""
    return name.rpartition(".")[2] if quantity == "moments" else ""


def _floor(reference: ReadTensors, start: ReadTensors) -> float:
    """Return what a tensor's norm counts as at least: a part of that of all tensors, and no more than all changes.

    A table that stays as it is, with numbers as large as a mask's, would hide whatever else is wrong. What is infinite
    has no size.
    """
    whole = {name: wide(tensor) for name, tensor in reference.items()}
    was = {name: wide(start[name]) for name in whole if name in start and start[name].shape == reference[name].shape}
    total, moved = (
        math.sqrt(sum(map(_square, tensors)))
        for tensors in (whole.values(), [tensor - was.get(name, 0.0) for name, tensor in whole.items()])
    )
    return min(FLOOR * total, moved)


def _square(tensor: torch.Tensor) -> float:
    """Return the sum of the squares of the numbers that are finite."""
    found = float(tensor.square().sum())
    return found if math.isfinite(found) else float(tensor.where(tensor.isfinite(), 0.0).square().sum())


def _parts(ours: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a tensor and the same part of the reference, which a GPU is sent."""
    reference = reference.to(ours.device)
    if not isinstance(ours, DTensor):
        return ours, reference
    if ours.shape != reference.shape:
        return ours.to_local(), reference
    spread = distribute_tensor(reference, ours.device_mesh, ours.placements, src_data_rank=None)
    return ours.to_local(), spread.to_local()


def _measure(ours: torch.Tensor, reference: torch.Tensor, floor: float, stored: float = 0.0) -> _Measure:
    """Return (relative difference, ratio of norms, our element that differs most, the reference's).

    A norm counts as at least `floor`, and `stored` is added to it. What both have alike is no difference, be it
    infinite or, as in memory that nobody wrote, no number.
    """
    if ours.shape != reference.shape:
        return math.inf, math.nan, math.nan, math.nan
    if not ours.numel():
        return 0.0, 1.0, 0.0, 0.0
    difference = (ours - reference).flatten()
    norm = float(difference.norm())
    if not math.isfinite(norm):
        alike = (ours == reference) | (ours.isnan() & reference.isnan())
        difference = difference.masked_fill(alike.flatten(), 0.0)
        norm = float(difference.norm())
    size = math.sqrt(_square(reference))
    at = int(difference.abs().argmax())
    relative = norm / max(max(size, floor) + stored, 1e-300)
    ratio = math.sqrt(_square(ours)) / size if size else (math.nan if norm else 1.0)
    return relative, ratio, float(ours.flatten()[at]), float(reference.flatten()[at])


def _stored(quantity: str, dtype: torch.dtype) -> float:
    """Return a unit in the last place over the tolerance of a quantity: what that unit counts as of a norm."""
    return torch.finfo(dtype).eps / tolerance(quantity, NAMES[dtype]) if dtype in NAMES else 0.0


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value
