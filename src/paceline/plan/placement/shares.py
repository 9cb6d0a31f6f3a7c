"""Shares by speed: samples of a batch over unequal replicas, blocks of a model over unequal stages. Whole numbers.

A step divides by the weight summed over all ranks, so shares of any size give one and the same gradient.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence


def share_out(total: int, speeds: Sequence[float], least: int = 0, most: int | None = None) -> tuple[int, ...]:
    """Return how many of `total` equal items each worker gets, so that the last one ends as early as can be.

    The next item always goes to the worker that would end first with one item more, which is optimal for equal items;
    of ties, to the first worker. 10 items at speeds 3 and 1 are shared 8 to 2. Every worker gets `least` items at
    least, and `most` at most. Raises ValueError for no positive speed, and where the bounds leave no shares.
    """
    if not speeds or min(speeds) <= 0:
        raise ValueError("every worker has a positive speed")
    most = total if most is None else most
    if not least * len(speeds) <= total <= most * len(speeds):
        raise ValueError(f"{total} items cannot be shared by {len(speeds)} workers with {least} to {most} each")
    whole = sum(speeds)
    shares = [int(total * speed / whole) for speed in speeds]  # never more than in the optimum, to within rounding
    shares = [min(most, max(0, share - 1)) for share in shares]
    if any(share < least for share in shares):
        shares = [least] * len(speeds)
    ends = [((n + 1) / speed, at) for at, (n, speed) in enumerate(zip(shares, speeds, strict=True)) if n < most]
    heapq.heapify(ends)
    for _ in range(total - sum(shares)):
        _, index = heapq.heappop(ends)
        shares[index] += 1
        if shares[index] < most:
            heapq.heappush(ends, ((shares[index] + 1) / speeds[index], index))
    return tuple(shares)


def split_by_speed(costs: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """Return how many links of a chain each worker gets, in order, one at least, so that the slowest ends early.

    A worker takes the cost of its links over its speed. Dynamic programming over (links, workers). Raises ValueError
    for fewer links than workers.
    """
    if len(costs) < len(speeds):
        raise ValueError("there are fewer links than workers")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    best = [sums[end] / speeds[0] for end in range(count + 1)]
    cuts: list[list[int]] = []
    for worker in range(1, len(speeds)):
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(worker + 1, count + 1):
            for begin in range(worker, end):
                slowest = max(best[begin], (sums[end] - sums[begin]) / speeds[worker])
                if slowest < row[end]:
                    row[end], cut[end] = slowest, begin
        best = row
        cuts.append(cut)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    edges = [0, *reversed(ends)]
    return tuple(end - begin for begin, end in itertools.pairwise(edges))
