"""A loop's model without wrappers. FSDP2 makes a class of its own of the user's, and wraps no child of it."""

from __future__ import annotations

import pytest
from distributed import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.verify.loops.unwrapped import inner_of, named

NAMES = ["module.weight", "module.bias", "head.weight", "head.bias"]


class Own(nn.Module):
    """A module of the user's own whose child is called `module`, beside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(3, 3), nn.Linear(3, 2)


class OwnDDP(DistributedDataParallel):
    """DDP, of which some make a class of their own."""


def names_of(kind: str) -> tuple[list[str], str]:
    model: nn.Module = Own()
    if kind == "FSDP2":
        fully_shard(model)
    if kind == "FSDP2 of torch's own":
        model = nn.Sequential()
        for name, child in Own().named_children():
            model.add_module(name, child)
        fully_shard(model)
    if kind in ("DDP", "own DDP"):
        model = {"DDP": DistributedDataParallel, "own DDP": OwnDDP}[kind](model)
    return list(named(model)), type(inner_of(model)).__name__


@pytest.mark.parametrize("kind", ["plain", "FSDP2", "FSDP2 of torch's own", "DDP", "own DDP"])
def test_all_parameters_are_named(kind: str) -> None:
    names, inner = run_ranks(names_of, 1, kind)[0]
    assert names == NAMES
    assert "DDP" not in inner and "DistributedDataParallel" not in inner
