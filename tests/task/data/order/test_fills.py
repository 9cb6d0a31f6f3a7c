"""How full batches of rows of different lengths are: by hand, for several data ranks and micro-batches."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from plan_examples import cluster, opened, plan, profile

from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.fullness import fullness
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.profile import Fill
from paceline.task.data.order.budget import TokenBudget
from paceline.task.data.order.lengths import FixedRows
from paceline.task.data.order.of_source import FiledOrder

LENGTHS = [4, 2, 2, 1, 1, 1]  # 11 tokens; with the first of the next epoch they are 15, so every batch of 12 is these
FILED = SimpleNamespace(lengths=LENGTHS, order=FiledOrder(6), samples=6)

# Three rows of four tokens are planned, and six rows come. Of (ranks, micro-batch): tokens and pairs of the fullest
# rank, passes, and the samples that are planned for it.
BY_HAND = {
    (1, 1): (4 + 2 + 2 + 1 + 1 + 1, 16 + 4 + 4 + 1 + 1 + 1, 6, 3),
    (1, 2): (2 * 4 + 2 * 2 + 2 * 1, 2 * 16 + 2 * 4 + 2 * 1, 3, 3),
    (1, 3): (3 * 4 + 3 * 1, 3 * 16 + 3 * 1, 2, 3),
    (2, 1): (4 + 2 + 2, 16 + 4 + 4, 3, 2),  # the first of two ranks has three rows, one after the other
    (2, 2): (4 + 2 * 2, 16 + 2 * 4, 2, 2),  # a row, and two
    (3, 1): (4 + 2, 16 + 4, 2, 1),
}


def test_a_budget_of_tokens_is_as_full_as_the_fullest_rank_has_it() -> None:
    """As if one rank had the batch, two ranks of micro-batch 1 made four passes each, and they make three."""
    found = TokenBudget(FILED, 0, 12, 4).fills(48, 3)
    by_hand = [
        Fill(size, tokens / (rows * 4), pairs / (rows * 16), passes / (rows / size), ranks)
        for (ranks, size), (tokens, pairs, passes, rows) in BY_HAND.items()
    ]
    assert list(found) == by_hand


@pytest.mark.parametrize(("ranks", "micro_batch"), BY_HAND)
def test_plans_take_what_was_counted_of_their_ranks(ranks: int, micro_batch: int) -> None:
    fills = TokenBudget(FILED, 0, 12, 4).fills(48, 3)
    model = opened(profile(2))
    model = dataclasses.replace(model, tokens_per_sample=4, fills=fills)
    accumulation = accumulation_for(3, ranks, micro_batch)
    chosen = plan(Layout(dp_replicate=ranks), micro_batch, batch=3, accumulation=accumulation)
    sheet = PricedTask(model, cluster(ranks), 3, 1).sheet(chosen)
    tokens, pairs, passes, rows = BY_HAND[ranks, micro_batch]
    assert sheet.passes_made[0] == pytest.approx(passes)
    assert sheet.fill("tokens")[0] * rows * 4 == pytest.approx(tokens)
    assert sheet.fill("pairs")[0] * rows * 16 == pytest.approx(pairs)
    assert sheet.tokens[0] == pytest.approx(tokens / passes), "of a pass, what its products have for rows"


def test_a_fixed_number_of_rows_is_filled_up_to_the_longest_beside_each() -> None:
    """Batches of three: 4, 2, 2 and 1, 1, 1 in turn, of which as many passes are made as planned."""
    found = {(each.ranks, each.micro_batch): each for each in FixedRows(FILED, 0, 3).fills(48, 3)}
    assert list(found) == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]
    assert found[1, 1] == Fill(1, (8 + 3) / 24, (24 + 3) / 96, None, 1)
    assert found[1, 2] == Fill(2, (4 + 4 + 3) / 24, (16 + 8 + 3) / 96, None, 1)  # a row, and two
    assert found[1, 3] == Fill(3, (12 + 3) / 24, (48 + 3) / 96, None, 1)
    assert found[2, 2] == Fill(2, (4 + 2) / 16, (16 + 2) / 64, None, 2)  # one rank has a row, the other two


def test_ranks_and_sizes_between_those_that_were_counted_are_read_off_a_line() -> None:
    """Two ranks, and eight: four lie halfway between them by their logarithms, and so do sizes."""
    known = [Fill(1, 0.5, 0.5, 1.0, 2), Fill(4, 0.9, 0.7, 1.4, 2), Fill(1, 0.7, 0.5, 2.0, 8)]
    ranks, sizes = np.array([2, 2, 4, 8, 16, 1]), np.array([2, 4, 1, 1, 1, 1])
    found = fullness(known, ranks, sizes)
    assert found["tokens"] == pytest.approx([0.7, 0.9, 0.6, 0.7, 0.7, 0.5])
    assert found["passes"] == pytest.approx([1.2, 1.4, 1.5, 2.0, 2.0, 1.0])
    assert all((part == 1).all() for part in fullness((), ranks, sizes).values())
