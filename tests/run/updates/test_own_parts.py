"""The update of a rank's own parts gives the bits of the optimizer's own step over sharded weights, and its state."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from paceline.run.process.world import join_world
from paceline.run.updates.own_parts import UpdateOfParts

SHAPES = ((6, 4), (3, 5), (1, 4), (7,))  # of which two ranks hold unequal parts, and one none
STEPS = 3
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True, "weight_decay": 0.1}),
    "adamw, each by itself": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "foreach": True, "momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "foreach": True}),
}


class Counted(UpdateOfParts):
    """Counts the steps that are made of parts."""

    of_parts = 0

    def _may(self) -> bool:
        found = super()._may()
        self.of_parts += found
        return found


class Watched(torch.optim.AdamW):
    """One of a user's own, which changes weights in a way that nobody here knows."""


def updated(name: str, by_parts: bool, misses: int | None) -> tuple[list[torch.Tensor], list[str], int]:
    """Return all that steps leave, what the state is made of, and how many steps were made of parts.

    A gradient is missing in the second step, if one is to be; and the rate changes, as under a schedule.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    weights = [nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])) for shape in SHAPES]
    kind, options = KINDS[name]
    optimizer = kind([{"params": weights[:2]}, {"params": weights[2:], "lr": 3e-2}], **options)
    assert UpdateOfParts.serves(optimizer)
    updates: Any = Counted(optimizer) if by_parts else optimizer
    for step in range(STEPS):
        for number, weight in enumerate(weights):
            gradient = torch.randn(SHAPES[number])
            weight.grad = None if (step, number) == (1, misses) else distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        updates.step()
    left = [weight.detach().full_tensor() for weight in weights]
    kinds = []
    for weight in weights:
        for key, value in sorted(optimizer.state[weight].items()):
            if value is not None:
                kinds.append(f"{key} {type(value).__name__} {tuple(value.shape)}")
                left.append(value.full_tensor() if isinstance(value, DTensor) else value.clone())
        assert weight.grad is None or isinstance(weight.grad, DTensor)
    return left, kinds, updates.of_parts if by_parts else 0


def compared() -> list[str]:
    """Return what differs."""
    join_world("cpu", threads=1)
    wrong = []
    for name in KINDS:
        for misses in (None, 1):
            own, mine = updated(name, False, misses), updated(name, True, misses)
            alike = all(torch.equal(one, other) for one, other in zip(own[0], mine[0], strict=True))
            if not (alike and own[1] == mine[1]):
                wrong.append(f"{name}, {misses}: {own[1]} and {mine[1]}")
            if mine[2] != {"momentum": STEPS - 1, "sgd": 0}.get(name, STEPS):  # else there is no state yet
                wrong.append(f"{name}: {mine[2]} steps of parts")
    optimizer = KINDS["adamw"][0]([nn.Parameter(distribute_tensor(torch.randn(4), init_device_mesh("cpu", (2,))))])
    seen = list[int]()
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    optimizer.param_groups[0]["params"][0].grad = optimizer.param_groups[0]["params"][0].detach().clone()
    UpdateOfParts(optimizer).step()
    return wrong + ([] if seen else ["a hook of the user's was not called"])


def test_parts_are_updated_as_the_sharded_weights_are() -> None:
    assert run_ranks(compared, 2) == [[], []]


def test_what_is_not_known_is_left_alone() -> None:
    weight = nn.Parameter(torch.zeros(2))
    assert not UpdateOfParts.serves(torch.optim.AdamW([weight])), "nothing is sharded"
    assert not UpdateOfParts.serves(Watched([weight])) and not UpdateOfParts.serves(torch.optim.RMSprop([weight]))
