"""How numbers are spread over ranks: the same by sums and maxima as by all of them in one list."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest
import torch
from thread_worlds import on_threads

from paceline.run.process.spread import FEW, OverRanks, spread_over
from paceline.run.process.world import World


def drawn(ranks: int, seed: int) -> list[list[float | None]]:
    """Return numbers of ranks that some lack, with ties, both signs, and magnitudes far apart."""
    draw = random.Random(seed)
    few = [draw.uniform(-2, 2) for _ in range(2)]
    kinds: list[Callable[[], float | None]] = [
        lambda: draw.choice(few),
        lambda: draw.choice([None, *few]),
        lambda: draw.uniform(-1, 1) * 10.0 ** draw.randint(-300, 300),
        lambda: draw.choice([0.0, -0.0, 5e-324, 1.0, 1.0 + 2**-52]),
        lambda: None,
        lambda: float(draw.randint(0, 3)),
    ]
    return [[kind() for kind in kinds] for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_sums_and_maxima_find_what_a_list_has(ranks: int) -> None:
    for seed in range(4):
        numbers = drawn(ranks, seed)
        known = on_threads(ranks, lambda world, numbers=numbers: spread_over(world, numbers[world.rank]))
        found = on_threads(ranks, lambda world, numbers=numbers: spread_over(world, numbers[world.rank], few=0))
        assert found == known and found == [found[0]] * ranks
        for at, each in enumerate(found[0]):
            column = [number for row in numbers if (number := row[at]) is not None]
            assert (each is None) == (not column)
            if isinstance(each, OverRanks):
                assert (each.count, each.least, each.most) == (len(column), min(column), max(column))
                assert each.median == statistics.median(column)
                assert numbers[each.rank][at] == each.most
                for own in range(len(column)) if len(column) > 1 else ():
                    others = statistics.median(column[:own] + column[own + 1 :])
                    assert each.median_without(column[own]) == others


def test_what_a_rank_sends_does_not_grow_with_the_ranks() -> None:
    sent: dict[int, int] = {}

    class Counted(World):
        def add_up(self, vector: torch.Tensor) -> None:
            sent[self.size] = sent.get(self.size, 0) + vector.numel()

        def maximum(self, values: list[float]) -> list[float]:
            sent[self.size] = sent.get(self.size, 0) + len(values)
            return values

    for ranks in (FEW + 1, 16384):
        spread_over(Counted(0, ranks, 0, torch.device("cpu")), [1.0, 2.0])
    assert sent[FEW + 1] == sent[16384] > 0
