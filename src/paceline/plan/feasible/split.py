"""The split of a chain of blocks into pipeline stages, by what the blocks cost. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from paceline.spec.profile import BlockProfile, ModelProfile

ROUNDING = 1 + 1e-9
StageLimits = list[tuple[list[float], float]]  # costs of every link, and the largest sum of a part


def split_by_cost(profile: ModelProfile, stages: int) -> tuple[int, ...]:
    """Return repeated blocks per stage such that the dearest stage is as cheap as can be; () with too few blocks.

    First the largest stage's FLOPs are made as small as possible (what comes before the repeated blocks and after them
    included), then its parameters, and among such splits the sizes are as even as can be. Every stage has a block.
    """
    repeated = [index for index, block in enumerate(profile.blocks) if block.recomputable]
    if len(repeated) < stages:
        return ()
    owners = {block.name: block.parameters for block in profile.blocks}

    def cost_of(block: BlockProfile) -> tuple[float, float]:
        held = block.parameters + owners.get(block.tied_to, 0)
        return block.matmul_flops + block.attention_flops, float(held)

    bounds = [0, *repeated[1:], len(profile.blocks)]
    links = [
        tuple(map(sum, zip(*(cost_of(block) for block in profile.blocks[begin:end]), strict=True)))
        for begin, end in itertools.pairwise(bounds)
    ]
    flops: list[float] = [link[0] for link in links]
    parameters: list[float] = [link[1] for link in links]
    if not any(flops):  # nothing is known to compute: parameters alone decide
        flops = [1.0] * len(flops)
    most_flops = _smallest(flops, stages, lambda limit: [(flops, limit)])
    most_parameters = _smallest(parameters, stages, lambda limit: [(flops, most_flops), (parameters, limit)])
    return _even([(flops, most_flops), (parameters, most_parameters)], stages)


def split_in_order(profile: ModelProfile, stages: int) -> tuple[int, ...]:
    """Return repeated blocks per stage where each is filled until its end passes its part; the last may stay empty.

    What Nanotron does (`build_model` of its models/base.py): costs are those of products, a look-up has none, and a
    block belongs to the stage in which its cost begins, so the first stages hold more than the last. Example: 32 layers
    and a head that costs as much as 2, over 8 stages of 4.25 layers' cost: 5, 4, 4, 4, 5, 4, 4, 2.
    """
    costs = [block.matmul_flops for block in profile.blocks]
    share, spent, stage = sum(costs) / stages, 0.0, 0
    sizes = [0] * stages
    for block, cost in zip(profile.blocks, costs, strict=True):
        sizes[stage] += block.recomputable
        spent += cost
        if stage + 1 < stages and spent > share * (stage + 1):
            stage += 1
    return tuple(sizes)


def _smallest(costs: Sequence[float], stages: int, limits_with: Callable[[float], StageLimits]) -> float:
    """Return the smallest largest sum with which `stages` parts are enough, to within rounding."""
    low, high = max(max(costs), sum(costs) / stages) * ROUNDING, sum(costs) * ROUNDING
    if _fewest(limits_with(low))[0] <= stages:
        return low
    while high > low * ROUNDING:
        middle = (low + high) / 2
        low, high = (low, middle) if _fewest(limits_with(middle))[0] <= stages else (middle, high)
    return high


def _fewest(limits: StageLimits) -> list[int]:
    """Return, for every link, how few parts hold it and all later ones within all limits; more than there are: none."""
    count = len(limits[0][0])
    ends, fewest = _reach(limits), [0] * (count + 1)
    for start in range(count - 1, -1, -1):
        fewest[start] = fewest[ends[start]] + 1 if ends[start] > start else count + 1
    return fewest


def _reach(limits: StageLimits) -> list[int]:
    """Return for every link where a part that starts there must end at the latest."""
    ends = []
    for costs, limit in limits:
        before = np.concatenate([[0.0], np.cumsum(costs)])
        ends.append(np.searchsorted(before, before[:-1] + limit, side="right") - 1)
    nearest: list[int] = np.min(ends, axis=0).tolist()
    return nearest


def _even(limits: StageLimits, stages: int) -> tuple[int, ...]:
    """Return sizes of `stages` parts within the limits, each as near to an even share of what is left as they allow."""
    count = len(limits[0][0])
    ends, fewest = _reach(limits), _fewest(limits)
    sizes, start = [], 0
    for left in range(stages - 1, -1, -1):
        allowed = [
            size for size in range(1, ends[start] - start + 1) if fewest[start + size] <= left <= count - start - size
        ]
        wanted = (count - start) / (left + 1)
        sizes.append(min(allowed, key=lambda size: (abs(size - wanted), size)))
        start += sizes[-1]
    return tuple(sizes)
