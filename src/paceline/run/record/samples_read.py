"""Which samples the ranks have really read in a step, for the journal: rank 0 alone gets what the others read."""

from __future__ import annotations

from paceline.run.loop.loader import StepBatch
from paceline.run.process.world import World
from paceline.spec.layout import Layout


def ids_read(batch: StepBatch, world: World, layout: Layout) -> list[int] | None:
    """Return the ids of a step's samples on rank 0, in order of position; None elsewhere. Every rank calls it.

    A rank holds and sends its own ids, and none where it has read what another one has.
    """
    first = layout.reads_first(world.rank)
    mine = [(micro.position, micro.ids.tolist()) for micro in batch.micro_batches if micro.counts and first]
    brought = world.bring_to_first(mine)
    if brought is None:
        return None
    parts = sorted(part for of_rank in brought for part in of_rank)
    return [sample for _, ids in parts for sample in ids]
