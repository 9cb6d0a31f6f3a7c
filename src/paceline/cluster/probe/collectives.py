"""The seconds that a collective adds to a rank's computing, as a training step meets collectives.

That is a difference of two times, and a program that comes between makes of it whatever it likes: an all-reduce of one
number was once stored with 1 us. Nothing wakes up sooner for having slept, so a collective beside computing takes no
less than one of a row of collectives. One that seems to take less than half of that is refused, and timed again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from paceline.cluster.probe.records import CollectiveTimes, GroupTimes, Latency
from paceline.cluster.probe.units import computing

if TYPE_CHECKING:
    from paceline.cluster.probe.rank import Rank

TRIES = 3  # to time a collective beside computing
# Of which the median counts. One in twenty waits for a whole turn of the scheduler: between two processes means over 40
# calls were 0.4 to 3.9 ms within a quiet minute (AMD EPYC, 2026-11-30).
BATCHES = 5
OFTEN, SELDOM = 20, 6  # calls in a batch on CPUs: of one number, and of megabytes
IN_A_ROW = 5  # collectives of which the fastest bounds what one takes in a step
IMPOSSIBLE = 0.5  # of that: both are times, and vary by some tens of per cent
# Between two processes a byte or a call takes something: what no clock can tell from nothing is refused as well.
LEAST_SECONDS = 1e-6


def collective_times(rank: Rank) -> CollectiveTimes | None:
    """Return what collectives over all ranks take, and over smaller groups of 2, 4, ... ranks, all groups at once."""
    import torch.distributed as dist

    if rank.ranks == 1:
        return None
    result: CollectiveTimes = {**_group_times(rank, dist.group.WORLD, rank.ranks), "groups": {}}
    size = 2
    while size < rank.ranks and rank.ranks % size == 0:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, rank.ranks, size)]
        result["groups"][str(size)] = _group_times(rank, groups[rank.rank // size], size)
        size *= 2
    return result


def _group_times(rank: Rank, group: object, ranks: int) -> GroupTimes:
    """Return the latency of a one-element all-reduce and the time of three collectives at two sizes, as in a step."""
    import torch
    import torch.distributed as dist

    one = torch.ones(1, device=rank.device)
    often, seldom = (OFTEN, SELDOM) if rank.kind == "cpu" else (40, 8)  # in each batch; an accelerator has one
    if rank.trial:
        often, seldom = 10, 3
    latency = time_in_step(rank, lambda: dist.all_reduce(one, group=group), often)
    result: GroupTimes = {"latency": latency, "sizes": []}
    sizes = (4, 16) if rank.kind == "cpu" else (16, 256)
    for mebibytes in sizes[:1] if rank.trial else sizes:
        elements = mebibytes * 2**18 // ranks * ranks
        whole = torch.ones(elements, device=rank.device)
        part = torch.ones(elements // ranks, device=rank.device)
        calls = {
            "all_reduce": partial(dist.all_reduce, whole, group=group),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part, group=group),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, group=group),
        }
        for name, call in calls.items():
            whole.fill_(1.0)
            added = time_in_step(rank, call, seldom)
            result["sizes"].append({"collective": name, "bytes": elements * 4, **added})
    return result


def time_in_step(rank: Rank, call: Callable[[], object], repeats: int) -> Latency:
    """Return the seconds that a collective adds to a rank that computes before it, as training does.

    On a CPU a collective after computing takes some ten times as long as the same collective in a row of collectives:
    gloo's threads have to wake up on cores that are computing, and a peer's thread may have to wait for a core.
    Returns the mean over the repeats of a batch, since a step waits for slow collectives too; of BATCHES the median.
    On an accelerator collectives have a queue of their own beside the computation, and are timed by themselves.

    Far less than in a row is impossible, on whichever rank: all of them time it again then. What is refused to the last
    is marked so, and the time in a row stands for it. Example: 2.7 ms of computing and 3.5 with an
    all-reduce are 0.8 ms; 3.6 ms of computing, beside another program, would leave none, where a row has 0.08 ms.
    """
    if rank.kind != "cpu":
        return {"seconds": rank.time(call, repeats=repeats)["seconds"]}
    least, seconds = _least_in_a_row(call), 0.0
    for _ in range(TRIES):
        seconds = statistics.median(_added(call, repeats, 1 if rank.trial else BATCHES))
        if not rank.any(seconds < IMPOSSIBLE * least):
            return {"seconds": seconds}
    return {"seconds": max(seconds, least), "refused": True}


def _added(call: Callable[[], object], repeats: int, batches: int) -> list[float]:
    """Return what a call adds to computing in each batch, against the faster one of computing alone before and after.

    What is computed has no spread that a step would meet: the slower mean was another program's doing.
    """
    work = computing()

    def work_and_call() -> None:
        work()
        call()

    found, before = [], _mean(work, repeats)
    for _ in range(batches):
        both, after = _mean(work_and_call, repeats), _mean(work, repeats)
        found.append(both - min(before, after))
        before = after
    return found


def refused_of(found: CollectiveTimes | None) -> int:
    """Return how many collectives of a rank have no time but that in a row."""
    groups: list[GroupTimes] = [found, *found["groups"].values()] if found else []
    return sum(each.get("refused", False) for group in groups for each in (group["latency"], *group["sizes"]))


def _mean(call: Callable[[], object], repeats: int) -> float:
    """Return the mean seconds of so many calls that all ranks begin together, after one that is not counted."""
    import torch.distributed as dist

    call()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def _least_in_a_row(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few calls in a row, after one that makes buffers and connections."""
    call()
    found = []
    for _ in range(IN_A_ROW):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return max(LEAST_SECONDS, min(found))
