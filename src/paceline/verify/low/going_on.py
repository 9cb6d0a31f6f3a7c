"""The weights and buffers of a layout before an update, whole, for one device that goes on from there."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.run.assemble import Assembled
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.task.models.held import whole_of
from paceline.verify.process.tensors_as_bytes import brought_to_first

Held = dict[str, Tensor]  # parameters and buffers of a whole model, by name


@torch.no_grad()
def held_by(model: nn.Module, world: World, layout: Layout) -> Held:
    """Return what the ranks hold of a model together, on the first rank; nothing on others. Every rank calls it.

    Of what several ranks hold, that of the lowest counts, so others send nothing. Weights must rest in their shards.
    """
    mine: Held = {}
    is_lowest = not any(at for axis, at in layout.coordinates(world.rank).items() if axis != "pp")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        whole = whole_of(tensor)
        if is_lowest:
            mine[name] = whole.detach().clone()
    everyone = brought_to_first(world, mine) or []
    return {name: tensor for of_rank in reversed(everyone) for name, tensor in of_rank.items()}


@contextlib.contextmanager
def each_start(built: Assembled, world: World, starts: list[Held]) -> Iterator[None]:
    """Add what the ranks hold before each turn of the steps made within it, as `held_by` returns it."""
    told = built.stepper.reached

    def reached(phase: str, step: int) -> None:
        if phase == "forward":  # the last update is made, and weights rest in their shards
            starts.append(held_by(built.model, world, built.stepper.plan.layout))
        told(phase, step)

    built.stepper.reached = reached
    try:
        yield
    finally:
        built.stepper.reached = told


@torch.no_grad()
def put_in(model: nn.Module, held: Held) -> None:
    """Give a model on one device the parameters and buffers of these names and shapes."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if (known := held.get(name)) is not None and known.shape == tensor.shape:
            tensor.copy_(known)
