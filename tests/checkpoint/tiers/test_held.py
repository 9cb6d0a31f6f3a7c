"""State that ranks hold in memory goes to whoever needs it, in any layout, or nobody goes on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tests_shared import device_here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from paceline.checkpoint import take_snapshot
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.tiers.held_by_ranks import HeldByRanks
from paceline.errors import ConfigError, StorageError


def _whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        "wide": torch.randn(5, 7),
        "half": torch.randn(9, 4).to(torch.bfloat16),
        "imaginary": torch.randn(4, 3, dtype=torch.complex64),
        "step": torch.tensor(3.0),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 3),
    }


def _laid_out(tensors: dict[str, torch.Tensor], placement: Placement) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh(device_here().type, (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor.to(device_here()), mesh, [placement if tensor.dim() > 1 else Replicate()])
        for name, tensor in tensors.items()
    }


def _moved(lost: bool, damage: str) -> str:
    """Move the state from one layout to the others; return what went wrong."""
    ranks, whole = Ranks(), _whole()
    shards = _laid_out(whole, Shard(0))
    taken = take_snapshot(4, _laid_out(whole, Replicate()) if lost else shards, {"progress": 4})
    if (lost and ranks.rank == 2) or (damage == "lost" and ranks.rank == 0):
        taken = dataclasses.replace(taken, values={})  # a new rank
    if damage == "changed" and ranks.rank == 1:
        next(value for part, value in taken.values.items() if part.name == "wide").mul_(2)
    try:
        for placement in (Shard(1), Replicate()):
            empty = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
            target = _laid_out(empty, placement)
            if damage == "other":
                target["wide"] = target["wide"].to(torch.float64)
            held = HeldByRanks(taken, ranks)
            assert held.extra == {"progress": 4} and held.names == sorted(whole)
            held.fill(target)
            for name, tensor in target.items():
                assert isinstance(tensor, DTensor) and torch.equal(tensor.full_tensor().cpu(), whole[name]), name
    except (StorageError, ConfigError) as error:
        return f"{error.what}: {error.because}"
    return ""


@pytest.mark.parametrize("lost", [False, True])
def test_shards_become_other_shards_and_a_new_rank_gets_its_own(lost: bool) -> None:
    assert run_ranks(_moved, 3, lost, "") == [""] * 3


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("lost", "they hold"),
        ("changed", "rank 1 no longer holds the values of 'wide[2:4,0:7]'"),
        ("other", "'wide' is float64"),
    ],
)
def test_what_is_not_whole_or_another_is_refused_on_every_rank(damage: str, says: str) -> None:
    found = run_ranks(_moved, 3, False, damage)
    assert len(set(found)) == 1 and says in found[0]
