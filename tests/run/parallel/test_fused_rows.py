"""The rows of a fused layer that each rank has: every row once, and none without where a part is too narrow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.run.parallel.tensor import _fused_rows


def rows_of(parts: tuple[int, ...], ranks: int) -> list[list[int]]:
    """Return the rows of every rank."""
    found = []
    for rank in range(ranks):
        group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        region: Any = SimpleNamespace(group=group)
        found.append([row for part in _fused_rows("qkv", parts, region) for row in range(part.start, part.stop)])
    return found


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("parts", [(12,), (8, 8, 8), (7, 3), (12, 5, 5), (6, 1)])
def test_each_row_is_on_one_rank_or_the_layer_is_refused(parts: tuple[int, ...], ranks: int) -> None:
    # Ranks take as many rows as the widest share, in order: the last one has none where those before have them all.
    starts_of_last = [(ranks - 1) * -(-part // ranks) for part in parts]
    if any(start >= part for start, part in zip(starts_of_last, parts, strict=True)):
        with pytest.raises(ConfigError, match="gives some ranks none"):
            rows_of(parts, ranks)
        return
    found = rows_of(parts, ranks)
    assert sorted(row for own in found for row in own) == list(range(sum(parts)))
    firsts = [sum(parts[:at]) for at in range(len(parts))]
    for own in found:
        assert all(any(first <= row < first + part for row in own) for first, part in zip(firsts, parts, strict=True))
