"""Ranks that are left save what they hold: whole where copies are, refused by name where something is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from survive_runs import ALONE, here, training

from paceline.errors import StorageError
from paceline.run.loop.resume import RunIdentity
from paceline.run.process.world import World
from paceline.run.survive.saving.memory_tier import memory_root, remove_memory_root
from paceline.run.survive.saving.survivors import save_survivors, state_here
from paceline.spec.layout import Layout


def _survive(folder: str, layout: Layout, lost: int, ahead: int = -1) -> tuple[str, str]:
    """Train three steps, lose a rank, and save from a world of the others; return the checkpoint or the error."""
    run = training(Path(folder), every=9, layout=layout)
    batches = iter(run)
    for _ in range(3):
        run.step(next(batches))
    progress = run.progress
    if here().rank == ahead:
        progress = dataclasses.replace(progress, step=4)
    taken = state_here(run._run, run._under.built, run.brief.plan, progress)
    left = [rank for rank in range(here().size) if rank != lost]
    smaller = dist.new_group(left)
    if here().rank == lost:
        return "lost", ""
    # The survivors' world, as a process that formed it anew sees it.
    world = World(left.index(here().rank), len(left), 0, torch.device("cpu"))
    try:
        return "", str(_save_over(smaller, run._run, taken, world))
    except StorageError as error:
        return str(error), ""


def _save_over(group: dist.ProcessGroup, run: RunIdentity, taken: object, world: World) -> Path:
    """Save where the default group is the survivors'."""
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        return save_survivors(run, taken, world)  # type: ignore[arg-type]
    finally:
        dist.distributed_c10d._update_default_pg(before)


def test_copies_of_a_lost_rank_make_the_state_whole(tmp_path: Path) -> None:
    found = run_ranks(_survive, 3, str(tmp_path), Layout(dp_replicate=3), 0)
    root = memory_root(tmp_path)
    assert [path for _, path in found] == ["", str(root / "step-00000003"), str(root / "step-00000003")], found
    run = training(tmp_path, every=9, world=ALONE)
    assert run.progress.step == 3
    remove_memory_root(tmp_path)


@pytest.mark.parametrize(
    ("layout", "ahead", "because"),
    [(Layout(dp_shard=3), -1, "do not add up"), (Layout(dp_replicate=3), 2, "is after step 4 and rank 0 after step 3")],
)
def test_what_is_lost_or_torn_is_refused_by_name(tmp_path: Path, layout: Layout, ahead: int, because: str) -> None:
    for error, path in run_ranks(_survive, 3, str(tmp_path), layout, 1, ahead)[::2]:
        assert because in error and not path, error
    root = memory_root(tmp_path)
    assert root is None or not list(root.iterdir())
    remove_memory_root(tmp_path)
