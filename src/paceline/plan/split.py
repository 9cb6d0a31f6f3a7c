"""The split of a chain of blocks into pipeline stages, by what the blocks cost. Imports no torch."""

from __future__ import annotations

from paceline.task.profile import ModelProfile

ROUNDING = 1 + 1e-9


def split_by_cost(profile: ModelProfile, stages: int) -> tuple[int, ...]:
    """Return repeated blocks per stage such that the dearest stage is as cheap as can be; () with too few blocks.

    First the largest stage's FLOPs are made as small as possible (what comes before the repeated blocks and after them
    included), then its parameters, and among such splits the sizes are as even as can be. Every stage has a block.
    """
    flops, parameters = _links(profile)
    if len(flops) < stages:
        return ()
    any_cost = [float("inf")] * len(flops)
    most_flops = _largest(flops, _partition(flops, any_cost, float("inf"), stages))
    return _partition(parameters, flops, most_flops * ROUNDING, stages)


def _links(profile: ModelProfile) -> tuple[list[float], list[float]]:
    """Return FLOPs and parameters of every repeated block, those before and after added to the first and the last."""
    repeated = [index for index, block in enumerate(profile.blocks) if block.recomputable]
    owners = {block.name: block.parameters for block in profile.blocks}
    flops, parameters = [0.0] * len(repeated), [0.0] * len(repeated)
    for index, block in enumerate(profile.blocks):
        at = max(sum(start <= index for start in repeated) - 1, 0)
        flops[at] += block.matmul_flops + block.attention_flops
        parameters[at] += block.parameters + owners.get(block.tied_to, 0)
    return flops, parameters


def _partition(costs: list[float], bounded: list[float], bound: float, stages: int) -> tuple[int, ...]:
    """Return the sizes of `stages` runs whose largest sum of `costs` is smallest; ties go to even sizes.

    No run's sum of `bounded` may exceed `bound`. Dynamic programming over (runs made, links used).
    """
    count = len(costs)
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    for made in range(stages):
        following: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        left = stages - made - 1
        for start, (largest, unevenness, sizes) in best.items():
            cost = limited = 0.0
            for stop in range(start + 1, count - left + 1):
                cost += costs[stop - 1]
                limited += bounded[stop - 1]
                if limited > bound:
                    break
                found = (max(largest, cost), unevenness + (stop - start) ** 2, (*sizes, stop - start))
                if (left or stop == count) and (stop not in following or found[:2] < following[stop][:2]):
                    following[stop] = found
        best = following
    return best[count][2]


def _largest(costs: list[float], sizes: tuple[int, ...]) -> float:
    """Return the largest sum of the runs."""
    sums, start = [], 0
    for size in sizes:
        sums.append(sum(costs[start : start + size]))
        start += size
    return max(sums)
