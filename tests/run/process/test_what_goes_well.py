"""Where all goes well no rank is asked for what it has: checks of a step cost reductions."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import run_ranks

from paceline.run.process.world import World, join_world
from paceline.run.record.remarks import data_faults
from paceline.task.data.storage.notices import DataNotices


class _Source:
    def __init__(self) -> None:
        self.notices = DataNotices()


def told(met: bool) -> tuple[list[tuple[str, str]], int]:
    """Return what a world says of its data, of which the last rank has met a fault, and how often it gathered."""
    world, source, gathered = join_world("cpu"), _Source(), []
    inner = World.gather

    def counted(self: World, item: Any) -> list[Any]:
        gathered.append(item)
        return inner(self, item)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "gather", counted)
        if met and world.rank == world.size - 1:
            source.notices.tell("read again", "the storage was busy")
        return data_faults(source, world, reads_first=True, left_out={}), len(gathered)


@pytest.mark.parametrize("size", [1, 2])
def test_faults_of_data_are_gathered_where_there_are_any(size: int) -> None:
    assert run_ranks(told, size, False) == [([], 0)] * size
    assert run_ranks(told, size, True) == [([("read again", "the storage was busy")], 1)] * size
