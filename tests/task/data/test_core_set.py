"""Core sets: greedy k-center takes what is farthest, the same on every machine, and covers as well as it promises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.task.data.prepare import core_set
from paceline.task.data.prepare.core_set import greedy_k_center


def radius(points: np.ndarray, centers: list[int]) -> float:
    return max(min(float(np.linalg.norm(point - points[center])) for center in centers) for point in points)


@pytest.mark.parametrize("seed", range(12))
def test_it_covers_within_twice_the_best_choice_and_smaller_sets_are_beginnings(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    points = drawn.normal(size=(12, 3)).astype(np.float32)
    whole = greedy_k_center(points, 12)
    assert sorted(whole.order.tolist()) == list(range(12)) and whole.radii[-1] == 0
    for count in (1, 2, 3):
        found = greedy_k_center(points, count)
        assert found.order.tolist() == whole.order[:count].tolist()
        mine = radius(points, found.order.tolist())
        assert found.radii[-1] == pytest.approx(mine, rel=1e-6)
        best = min(radius(points, list(some)) for some in itertools.combinations(range(12), count))
        assert best <= mine <= 2 * best + 1e-9


def test_equal_points_are_taken_last_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.array([[0.0], [4.0], [0.0], [4.0], [8.0], [4.0]])
    plain = greedy_k_center(points, 6)
    assert plain.order.tolist() == [1, 0, 4, 2, 3, 5], "the most central, the ends, and then copies as they stand"
    monkeypatch.setattr(core_set, "AT_ONCE", 2)
    assert np.array_equal(greedy_k_center(points, 6).order, plain.order)


def test_points_far_from_zero_are_told_apart() -> None:
    points = np.array([[1e8], [1e8 + 1], [1e8 + 2], [1e8 + 9]])
    assert greedy_k_center(points, 3).order.tolist() == [2, 3, 0]
