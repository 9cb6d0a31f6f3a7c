"""Ranks that a launcher has started may hash words otherwise: it is said, since no proof sees it."""

from __future__ import annotations

import pytest
from distributed import run_kept

from paceline.run.process import alike
from paceline.run.process.world import join_world


def said(is_alike: bool) -> list[str]:
    world = join_world("cpu", threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike, "hash", lambda word: -(3**40) - (0 if is_alike else world.rank), raising=False)
        return alike.hashes_differ(world)


@pytest.mark.parametrize("is_alike", [False, True])
def test_hashes_that_differ_are_said_on_every_rank(is_alike: bool) -> None:
    for told in run_kept(said, 2, is_alike):
        assert bool(told) is not is_alike
        assert is_alike or "PYTHONHASHSEED=0" in told[0]
