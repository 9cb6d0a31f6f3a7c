"""Ranks of a loop that wait for each other for ever end its proof with where each waits, before torch's time-out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from test_adapter import batches_of, network, objective

from paceline.errors import VerificationFailed
from paceline.supervise.pulses import standstill
from paceline.verify.loops.adapter import verify_loop


@dataclasses.dataclass
class Ended:
    """How the proof of a loop ended on a rank: with which words, after which error, and what it left of its folder."""

    told: str
    after: str
    left: bool


def ends_waiting() -> Ended:
    """Prove a loop whose ranks make collectives in another order each, with a watch that looks often."""
    for name, seconds in (("LOOK", 0.05), ("LONGEST_LOOK", 0.1), ("STILL", 0.4), ("SETTLED", 0.1)):
        setattr(standstill, f"{name}_SECONDS", seconds)
    model, rank = network(), dist.get_rank()
    seen: list[Path] = []
    real = standstill.stack_path

    def stack_path(folder: Path, number: int) -> Path:
        seen.append(folder)
        return real(folder, number)

    standstill.stack_path = stack_path

    def step(batch: object) -> torch.Tensor:
        if rank == 0:
            dist.broadcast(torch.zeros(3), src=1)
        dist.all_reduce(torch.zeros(3))
        return torch.zeros(())

    with pytest.raises(VerificationFailed) as raised:
        verify_loop(step, model, batches_of(rank), objective=objective)
    return Ended(str(raised.value), type(raised.value.__cause__).__name__, rank == 0 and seen[0].exists())


def test_ranks_of_a_loop_that_wait_for_each_other_are_told_on_every_rank() -> None:
    found = run_ranks(ends_waiting, 2)
    for each in found:
        assert "all 2 ranks wait for each other, and would for ever" in each.told
        assert "rank 0 in broadcast, called by step (" in each.told
        assert "rank 1 in all_reduce, called by step (" in each.told
        assert each.after != "NoneType" and not each.left
