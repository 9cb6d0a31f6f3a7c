"""Who writes what, agreed on by simulated ranks: every part once, evenly, and nothing that grows with their number."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.boxes import Box, check_cover
from paceline.checkpoint.save_plan import rows_of
from paceline.checkpoint.snapshot import Part
from paceline.checkpoint.untrusted import Refused
from paceline.checkpoint.writers.choose import WriterChoice, choose_writers, cover_of
from paceline.checkpoint.writers.talk import WORD, carry

ROWS, WIDTH = 512, 8


def chosen(of_ranks: list[list[Part]]) -> tuple[list[WriterChoice], list[int]]:
    """Return what all ranks choose, and the bytes that each heard."""
    return carry([choose_writers(parts, rank, len(of_ranks)) for rank, parts in enumerate(of_ranks)])


def part(name: str, begin: int, rows: int) -> Part:
    return Part(name, "float32", (ROWS, WIDTH), (begin, 0), (rows, WIDTH))


def hybrid(rank: int, ranks: int) -> list[Part]:
    """Return a rank's parts of a layout with two copies: matrices are sharded over the half, norms are on all."""
    half = ranks // 2
    share = ROWS // half
    sharded = [part(f"layer{at}", rank % half * share, share) for at in range(6)]
    return [*sharded, *(Part(f"norm{at}", "float32", (WIDTH,), (0,), (WIDTH,)) for at in range(4))]


def stages(rank: int, ranks: int) -> list[Part]:
    """Return a rank's parts of two pipeline stages, of which both hold the embedding."""
    stage = 2 * rank // ranks
    return [part(name, 0, ROWS) for name in ("embedding", *(f"stage{stage}.{at}" for at in range(8)))]


@pytest.mark.parametrize("layout", [hybrid, stages])
@pytest.mark.parametrize("ranks", [2, 4, 6, 16, 64])
def test_every_part_is_written_once_by_a_rank_that_holds_it(layout: Callable[..., list[Part]], ranks: int) -> None:
    ranks = 8 if layout is hybrid and ROWS % (ranks // 2) else ranks
    of_ranks = [layout(rank, ranks) for rank in range(ranks)]
    choices, _ = chosen(of_ranks)
    written: Counter[tuple[str, Box]] = Counter()
    loads = [0] * ranks
    for rank, (parts, choice) in enumerate(zip(of_ranks, choices, strict=True)):
        for own, writer in zip(parts, choice.writers, strict=True):
            assert own in of_ranks[writer]
            written[own.name, own.box] += writer == rank
            loads[rank] += own.bytes * (writer == rank)
    assert set(written.values()) == {1}
    kinds: dict = {}
    rows_of(kinds, of_ranks)  # as one rank that is told of all sees it
    assert choices[0].kinds == kinds and list(choices[0].kinds) == list(kinds) and not choices[0].torn
    largest = max(own.bytes for parts in of_ranks for own in parts)
    assert max(loads) - min(loads) <= 2 * largest, loads


def test_the_balance_of_copies_is_zero_where_they_are_equal_and_only_there() -> None:
    of_ranks = [hybrid(rank, 8) for rank in range(8)]
    choices, _ = chosen(of_ranks)
    shares: defaultdict[tuple[str, Box], list[int]] = defaultdict(list)
    for parts, choice in zip(of_ranks, choices, strict=True):
        for own, share in zip(parts, choice.shares, strict=True):
            shares[own.name, own.box].append(share)
    assert all(sum(of_part) % WORD == 0 for of_part in shares.values())
    (norm,) = [of_part for (name, _), of_part in shares.items() if name == "norm0"]
    assert sum(share * (7 + (1, -1, 0, 0, 0, 0, 0, 0)[at]) for at, share in enumerate(norm)) % WORD


def test_ranks_that_disagree_about_a_tensor_are_seen() -> None:
    choices, _ = chosen([[part("x", 0, ROWS)], [Part("x", "float32", (ROWS, 9), (0, 0), (ROWS, 9))], []])
    assert choices[0].torn == ("x",)


def test_no_rank_hears_more_of_many_ranks_than_of_few() -> None:
    most = {}
    for ranks in (16, 256):
        of_ranks = [hybrid(rank, ranks) for rank in range(ranks)]
        _, heard = chosen(of_ranks)
        most[ranks] = (heard[0], max(heard))
    for few, many in zip(most[16], most[256], strict=True):
        assert many < 3 * few, most  # the rounds are twice as many; all parts of all ranks would be 16 times as many


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape and boxes that cover it once: the whole, cut in two again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        for at, size in ((0, cut), (cut, sizes[dim] - cut)):
            moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
            boxes.append((moved, (*sizes[:dim], size, *sizes[dim + 1 :])))
    return shape, boxes


@given(tilings(), st.data())
def test_weights_of_parts_add_up_exactly_where_they_cover_the_tensor_once(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    whole = ((0,) * len(shape), shape)
    assert sum(map(cover_of, boxes)) % WORD == cover_of(whole)
    at = data.draw(st.integers(0, len(boxes) - 1))
    other = data.draw(st.sampled_from(boxes))
    changed = [*boxes[:at], other, *boxes[at + 1 :]]
    try:
        check_cover("x", whole, changed)
    except Refused:
        assert sum(map(cover_of, changed)) % WORD != cover_of(whole)
    else:
        assert sum(map(cover_of, changed)) % WORD == cover_of(whole)
