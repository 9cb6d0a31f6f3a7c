"""The weights and buffers of a layout after an update, whole, for one device that goes on from there."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from paceline.run.process.world import World
from paceline.task.models.held import whole_of

Held = dict[str, Tensor]  # parameters and buffers of a whole model, by name


@torch.no_grad()
def held_by(model: nn.Module, world: World) -> Held:
    """Return what the ranks hold of a model together, on the first rank; nothing on others. Every rank calls it.

    Of what several ranks hold, that of the lowest counts. Weights must rest in their shards.
    """
    mine: Held = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        whole = whole_of(tensor)
        mine[name] = whole.detach().clone()
    everyone = world.bring_to_first(mine) or []
    return {name: tensor for of_rank in reversed(everyone) for name, tensor in of_rank.items()}


@torch.no_grad()
def put_in(model: nn.Module, held: Held) -> None:
    """Give a model on one device the parameters and buffers of these names and shapes."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if (known := held.get(name)) is not None and known.shape == tensor.shape:
            tensor.copy_(known)
