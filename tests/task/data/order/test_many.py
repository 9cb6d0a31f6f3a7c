"""Ids that are worked out for many steps at once are those of each position, whatever the steps do."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.errors import DataError
from paceline.task.data.order.many_steps import AT_ONCE, StepIds
from paceline.task.data.order.mixture import MixShare, MixtureOrder
from paceline.task.data.order.of_source import GlobalOrder, ids_at

SEED = 11


@pytest.mark.parametrize("samples", [1, 7, 1000])
def test_any_steps_of_any_sizes(samples: int) -> None:
    source, drawn = SimpleNamespace(samples=samples), random.Random(samples)
    found, position = StepIds(source, SEED), 0
    for _ in range(300):
        batch = drawn.choice([1, 6, 6, 6, 40, AT_ONCE + 3])
        first = drawn.randrange(batch)
        places = np.arange(position + first, position + drawn.randint(first + 1, batch))
        assert np.array_equal(found.at(places, batch), ids_at(source, SEED, places))
        for steps, row in enumerate(found.known(5)):  # what is known of steps as large as this one
            assert np.array_equal(row, ids_at(source, SEED, places + steps * batch))
        position = drawn.choice([position + batch, position + batch, drawn.randrange(5000)])


def test_an_order_that_ends_is_asked_for_nothing_beyond_its_end() -> None:
    shares = [MixShare(samples=30, weight=1.0, most=30), MixShare(samples=20, weight=1.0, most=20)]
    order = MixtureOrder(shares, [GlobalOrder(30), GlobalOrder(20)])
    source = SimpleNamespace(samples=50, order=order)
    found = StepIds(source, SEED)
    read = [found.at(np.arange(at, at + 10), 10) for at in range(0, 50, 10)]
    assert sorted(np.concatenate(read)) == list(range(50))
    with pytest.raises(DataError, match="the mixture ends after 50 samples"):
        found.at(np.arange(45, 55), 10)


def test_what_is_known_of_smaller_batches_says_nothing_of_larger_ones() -> None:
    """Batches of 8 samples and then of 9, of which a rank has the first four: its second row of steps is elsewhere."""
    source = SimpleNamespace(samples=1000)
    for smaller in range(12, 30):
        found = StepIds(source, SEED)
        for step in range(smaller):
            found.at(np.arange(8 * step, 8 * step + 4), 8)
        places = np.arange(8 * smaller, 8 * smaller + 4)
        found.at(places, 9)
        for steps, row in enumerate(found.known(5)):
            assert np.array_equal(row, ids_at(source, SEED, places + 9 * steps))
