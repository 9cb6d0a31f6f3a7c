"""The state of a world that has lost ranks, saved by those that are left, so that any other world can go on from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint import Snapshot, publish, take_snapshot, write
from paceline.checkpoint.ranks import Ranks
from paceline.errors import StorageError
from paceline.run.assemble import Assembled
from paceline.run.loop.resume import Progress, RunIdentity, checkpoint_root, saved_state
from paceline.run.process.world import World
from paceline.run.survive.saving.memory_tier import make_memory_root, memory_root
from paceline.spec.plan import Plan


def state_here(run: RunIdentity, built: Assembled, plan: Plan, progress: Progress) -> Snapshot:
    """Return what this rank holds, between two steps. It sends nothing: peers may be dead."""
    tensors, extra = saved_state(run, built, plan, progress)
    return take_snapshot(progress.step, tensors, extra)


def save_survivors(
    run: RunIdentity, taken: Snapshot, world: World, *, in_memory: bool = True, fence: Callable[[], None] | None = None
) -> Path:
    """Return the folder of a checkpoint of what the ranks of `world` hold, in memory or else in the run's directory.

    Every rank calls it, with a snapshot of one step from whatever world it was in before. Raises StorageError on all
    ranks where they are not of one step, or do not hold every tensor whole: it names the first that is lost.
    """
    ranks = Ranks(alone=world.size == 1)
    what = f"the state of the {world.size} ranks that are left was not saved"
    ranks.settle(what, lambda: (taken.step, taken.extra["progress"]), _same_step)
    disk = checkpoint_root(run.dir)
    root = ranks.from_first(what, lambda: make_memory_root(run.dir)) if in_memory else disk
    other = disk if in_memory else ranks.from_first(what, lambda: memory_root(run.dir))
    written = write(root, taken, alone=world.size == 1)
    keep_last = 1 if in_memory else run.spec.run.keep_last
    return publish(written, keep_last=keep_last, fence=fence, beside=(other,) if other else ()).path


def _same_step(of_ranks: list[tuple[int, dict[str, int]]]) -> list[None]:
    steps = [Progress(**progress) for _, progress in of_ranks]
    for rank, progress in enumerate(steps):
        if progress != steps[0]:
            raise StorageError(
                f"rank {rank} is after step {progress.step} and rank 0 after step {steps[0].step}",
                "a rank was lost while they updated their weights, some before and some after",
                "go on from the newest checkpoint",
            )
    return [None] * len(steps)
