"""Which samples the ranks have really read in a step, for the journal of rank 0.

Which sample stands at a position is a pure function, so rank 0 works out the ids of a batch by itself, and the ranks
add up one number that is zero where all have read just these. Where it is not, each rank sends what it has read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from paceline.run.loop.loader import MicroBatch, StepBatch
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.task.data.order.permutation import GOLDEN, mix64

IdsOf = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]  # the ids of samples at these positions


def ids_read(batch: StepBatch, world: World, layout: Layout, ids_of: IdsOf) -> list[int] | None:
    """Return the ids of a step's samples on rank 0, in order of position; None elsewhere. Every rank calls it.

    A rank counts its own samples, and none where it has read what another one has.
    """
    first = layout.reads_first(world.rank)
    mine = [micro for micro in batch.micro_batches if micro.counts and first]
    planned = ids_of(np.arange(batch.position, batch.position + batch.samples)) if world.is_first else None
    if world.size > 1 and _is_planned(batch, mine, planned, world):
        return None if planned is None else planned.tolist()
    brought = world.bring_to_first([(micro.position, micro.ids.tolist()) for micro in mine])
    if brought is None:
        return None
    parts = sorted(part for of_rank in brought for part in of_rank)
    return [sample for _, ids in parts for sample in ids]


def _is_planned(batch: StepBatch, mine: list[MicroBatch], planned: npt.NDArray[np.int64] | None, world: World) -> bool:
    """Return whether the samples that all ranks have read are the planned ones of rank 0, each at its position, once.

    They are taken to be where sums of 64 bits are alike: of reads that depart one in 2^64 is not seen.
    """
    departs = sum(_marks(positions_of(micro), micro.ids) for micro in mine)
    if planned is not None:
        departs -= _marks(np.arange(batch.position, batch.position + batch.samples), planned)
    total = torch.full((1,), (departs + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=world.device)
    world.add_up(total)
    return int(total) == 0


def positions_of(micro: MicroBatch) -> npt.NDArray[np.int64]:
    """Return the position of each of a micro-batch's samples."""
    if micro.places is not None:
        return micro.places[: len(micro.ids)]
    return np.arange(micro.position, micro.position + len(micro.ids), dtype=np.int64)


def _marks(positions: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> int:
    """Return the sum of a number for each sample at its place, modulo 2^64, whose bits look random."""
    places = mix64(positions.astype(np.uint64) * np.uint64(GOLDEN))
    return int(mix64(places + ids.astype(np.uint64)).sum(dtype=np.uint64))
