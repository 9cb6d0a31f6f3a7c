"""Invariants of training: ranks that hold the same thing hold the same bits. A silent divergence stops the run.

Copies of a weight (over `dp_replicate`, whole weights over `tp`, a tied one on two pipeline stages) get equal gradients
and equal updates, so they must stay equal to the last bit; so must the learning rate, the loss, the gradient norm, the
loss scale and whether a step was made at all. Copies that make steps by themselves agree within a copy, and all of
them after an outer step; what a step reports is over all copies, and so alike on all ranks. A norm that is not a number
(an fp16 overflow) is one on all ranks alike.

Copies are compared by the smallest and the largest of their fingerprints, reduced along one axis of the mesh after the
other: what a rank sends grows with what it holds, and not with the number of ranks.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import VerificationFailed
from paceline.run.loop.step import StepStats
from paceline.run.numerics.precision import INTEGERS
from paceline.run.process.groups import DATA_MESH_AXES, Mesh
from paceline.run.process.world import World, build_mesh
from paceline.spec.layout import Layout
from paceline.task.models.held import is_spread

WIDTH = 4096
BUFFER = ("buffer",)  # stands in the place of a parameter's part
DENSE, EXPERT = ("dp_replicate", "fsdp", "tp"), ("dp_replicate", "expert_shard", "ep", "tp")  # axes of a stage's ranks
FIRST_STEPS = 10  # of a process, each of which is checked: most divergences are there from the start
NOT_A_NUMBER = -1  # in place of the bits of any NaN
HeldSums = dict[tuple[Any, ...], int]


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum of a tensor's bit patterns modulo 2^64, each weighed by its place: another one for other content.

    It is an int64 without dimensions where the tensor is.

    The places are those of a table of WIDTH columns; sums of its columns and of its rows are weighed, without a copy.
    """
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = real.contiguous().flatten()
    bits = flat.view(INTEGERS[flat.element_size()])
    whole = bits.numel() - bits.numel() % WIDTH
    table = bits[:whole].view(-1, WIDTH)
    rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    columns[: bits.numel() - whole] += bits[whole:]
    return _weighed(columns) + _weighed(rows)


def _weighed(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum of integers, each times an odd number of its place's own, modulo 2^64."""
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()


def is_due(step: int, first: int, every: int) -> bool:
    """Return whether a step is checked: each of a process's first ten, from step `first` on, and then every so many."""
    return step < first + FIRST_STEPS or step % every == 0


def bits_of(number: float) -> int:
    """Return the bits of a number as an integer, the same one for every NaN."""
    return NOT_A_NUMBER if math.isnan(number) else int.from_bytes(struct.pack("<d", number), "little")


def numbers_of(stats: StepStats, scale: float | None, chosen: str = "") -> dict[str, float]:
    """Return the numbers of a step that all ranks must have alike, by the name that a message gives them.

    `chosen` says which of the step's candidates were trained on, where it chose among candidates.
    """
    numbers = {
        "the gradient norm": stats.grad_norm,
        "the learning rate": stats.lr,
        "the loss": stats.loss,
        "the loss scale": 1.0 if scale is None else scale,
        "whether the step updated the weights": float(stats.updated),
    }
    if chosen:
        numbers["which samples were chosen"] = float(zlib.crc32(chosen.encode()))
    for name, turn in stats.turns.items():
        numbers |= {f"the loss of {name}": turn.loss, f"the gradient norm of {name}": turn.grad_norm}
        numbers[f"whether {name} updated its weights"] = float(turn.updated)
    return numbers


def held_by(model: nn.Module, numbers: Mapping[str, float], apart: int | None = None) -> HeldSums:
    """Return fingerprints of what this rank holds, by (name, part): ranks with the same key must have the same one.

    `apart` is the number of the rank's copy where copies hold weights of their own.
    """
    found: dict[tuple[object, ...], torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        part: tuple[object, ...] = () if apart is None else (("copy", apart),)
        local = parameter
        if is_spread(parameter):
            places = zip(parameter.placements, parameter.device_mesh.get_coordinate() or (), strict=False)
            part += tuple((str(place), at) for place, at in places if not place.is_replicate())
            local = parameter.to_local()  # type: ignore[assignment]
        found[name, part] = fingerprint(local)
    # A buffer is whole on every rank, a function of the weights or of what all ranks saw together; or it is frozen.
    for name, buffer in model.named_buffers():
        if not is_spread(buffer):
            found[name, BUFFER] = fingerprint(buffer)
    return {("", name): bits_of(value) for name, value in numbers.items()} | _on_host(found)


def _on_host(found: Mapping[tuple[object, ...], torch.Tensor]) -> HeldSums:
    """Return fingerprints as numbers, with one wait for each device."""
    held: HeldSums = {}
    for device in {value.device for value in found.values()}:
        keys = [key for key, value in found.items() if value.device == device]
        held |= zip(keys, torch.stack([found[key] for key in keys]).tolist(), strict=True)
    return held


def check_agreement(
    model: nn.Module,
    numbers: Mapping[str, float],
    step: int,
    world: World,
    layout: Layout,
    apart: int | None = None,
) -> None:
    """Raise VerificationFailed on every rank where ranks that must agree do not. Every rank calls it.

    `numbers` are what all ranks must have alike, by name; `apart` is the rank's copy where copies may differ after this
    step. The message names the first tensor, the ranks and the step: only where copies differ do all ranks tell each
    other what they hold.
    """
    mesh = build_mesh(layout, world)
    if mesh is None:
        return
    held, own = held_by(model, numbers, apart), frozenset[str]() if apart is None else frozenset({"dp_replicate"})
    if world.maximum([float(_copies_differ(model, held, mesh, world.device, own))])[0]:
        _name_the_first(world.gather(held), step)


def _copies_differ(model: nn.Module, held: HeldSums, mesh: Mesh, device: torch.device, own: frozenset[str]) -> bool:
    """Return whether this rank sees copies of something that it holds differ, weights along the axes `own` left out.

    Every rank calls it.
    """
    keys, split = list(held), {name: _split_along(parameter) | own for name, parameter in model.named_parameters()}
    bits = torch.tensor([_signed(held[key]) for key in keys], device=device)
    extremes = torch.stack([bits, ~bits])  # the largest of ~x tells the smallest x, and ~ has no overflow
    for axis in dict.fromkeys((*DENSE, *EXPERT)):
        copied = [at for at, key in enumerate(keys) if axis in _copied_along(split.get(key[0], frozenset()))]
        if copied and (group := mesh.group_of(axis)).size() > 1:
            part = extremes[:, copied]
            dist.all_reduce(part, op=dist.ReduceOp.MAX, group=group)
            extremes[:, copied] = part
    largest, smallest = extremes[0].tolist(), (~extremes[1]).tolist()
    differ = largest != smallest
    if mesh.layout.pp > 1:  # stages hold other things, but for tied weights: what they share is seen by name
        known: HeldSums = {}
        stages: list[Any] = [None] * mesh.layout.pp
        dist.all_gather_object(stages, dict(zip(keys, largest, strict=True)), group=mesh.get_group("pp"))
        differ |= any(known.setdefault(key, value) != value for stage in stages for key, value in stage.items())
    return differ


def _split_along(parameter: nn.Parameter) -> frozenset[str]:
    """Return the axes along which ranks hold different parts of a parameter."""
    if not is_spread(parameter):
        return frozenset()
    names = parameter.device_mesh.mesh_dim_names or ()
    along = [name for name, place in zip(names, parameter.placements, strict=True) if not place.is_replicate()]
    return frozenset(axis for name in along for axis in (DATA_MESH_AXES if name == "data" else (name,)))


def _copied_along(split: frozenset[str]) -> set[str]:
    """Return the axes along which the ranks of a stage hold equal copies of a tensor that is split along `split`."""
    return set(EXPERT if split & {"expert_shard", "ep"} else DENSE) - split


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _name_the_first(of_ranks: list[HeldSums], step: int) -> None:
    """Raise VerificationFailed for the first thing that ranks hold differently."""
    first: dict[tuple[object, ...], tuple[int, int]] = {}
    for rank, held in enumerate(of_ranks):
        for key, value in held.items():
            owner, expected = first.setdefault(key, (rank, value))
            if value != expected:
                name = key[0] or key[1]
                if key[1] == BUFFER:
                    raise _drifted(name, owner, rank, step)
                raise VerificationFailed(
                    f"step {step}: ranks {owner} and {rank} no longer agree on {name}",
                    "both hold the same part of it, and its bits differ: an update or a sum went another way on one",
                    "start the same command again: it resumes from the last checkpoint; `paceline verify` the layout",
                ).naming_ranks()
    raise AssertionError(f"step {step}: copies differ, and no two ranks with the same part of anything do")


def _drifted(name: str, owner: int, rank: int, step: int) -> VerificationFailed:
    return VerificationFailed(
        f"step {step}: ranks {owner} and {rank} no longer agree on the buffer {name}",
        "the model changes it in its forward pass by what the rank's own rows hold, so that each rank has another one",
        "change it by the weights alone, sum over all ranks what goes into it, or one device",
    ).naming_ranks()
