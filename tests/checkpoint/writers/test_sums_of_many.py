"""What ranks of a large group agree on goes up a tree and down again, and is what one sum of all would be."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from distributed import run_ranks

from paceline.checkpoint import ranks
from paceline.checkpoint.ranks import Ranks

WORD = 2**64


def numbers_of(rank: int) -> list[int]:
    return [WORD - 1 - rank, rank, rank * 2**40, 2**32 - 1]


def agreed() -> tuple[list[int], list[bool]]:
    """Return the sums over all ranks, and which ranks have set a flag: those of an even number have set their own."""
    here = Ranks()
    flags = [here.rank == each and each % 2 == 0 for each in range(here.size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "RINGS", 2)
        patch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("a ring: 2 N messages, one after another"))
        return here.total(numbers_of(here.rank)), here.any_of(flags)


@pytest.mark.parametrize("size", [3, 4, 6, 7])
def test_a_tree_adds_up_what_a_sum_does(size: int) -> None:
    columns = zip(*map(numbers_of, range(size)), strict=True)
    expected = [sum(column) % WORD for column in columns], [rank % 2 == 0 for rank in range(size)]
    assert run_ranks(agreed, size) == [expected] * size
