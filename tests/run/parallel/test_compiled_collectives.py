"""What moves activations between tensor ranks has its own backward pass, compiled too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import run_kept
from tests_shared import device_here
from torch import Tensor

from paceline.task.models.layers import collectives

MOVES = ("share", "add", "gather", "scatter", "join", "part", "once")


def moved(name: str, compiled: bool) -> tuple[Tensor, Tensor]:
    """Return what comes out between two layers, and the gradient of what went in."""
    torch._dynamo.reset()
    draws = torch.Generator().manual_seed(dist.get_rank())
    x, weight = torch.randn(2, 4, 3, generator=draws), torch.randn(3, 3, generator=draws)
    x, weight = x.to(device_here()).requires_grad_(), weight.to(device_here())

    def between(x: Tensor) -> Tensor:
        return torch.tanh(getattr(collectives, name)(torch.tanh(x @ weight), dist.group.WORLD)) @ weight

    found = (torch.compile(between, backend="eager") if compiled else between)(x)
    found.square().sum().backward()
    assert x.grad is not None
    return found.detach(), x.grad


@pytest.mark.parametrize("name", MOVES)
def test_a_compiled_move_has_the_gradient_of_its_table(name: str) -> None:
    plain, compiled = (run_kept(moved, 2, name, how) for how in (False, True))
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
