"""Rows that meet: the first batch has hardly any two of one label among thousands, and hardly ever one sample twice.

Losses that compare rows of one identity, or count a thing once however often it comes, are sums over rows until such
rows are in one piece.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from paceline.task.data.order.of_source import ids_at
from paceline.task.data.protocol import Source
from paceline.verify.reached.kept_rows import mapped_of

APART = 2  # a row meets the one so many rows on
PIECES = (APART, APART)


class RowsThatMeet(Enum):
    """Which rows meet, in words."""

    LABELS = ", the last of which have the labels and numbers of the first,"
    SAMPLES = ", the last of which are the samples of the first,"


def meetings_of(source: Source) -> tuple[RowsThatMeet, ...]:
    """Return which rows can be made to meet. What a collate fills up follows from lengths: labels keep their rows."""
    mapped = mapped_of(source)
    is_stacked = mapped is not None and mapped.collate is None
    return (RowsThatMeet.LABELS, RowsThatMeet.SAMPLES) if is_stacked else (RowsThatMeet.SAMPLES,)


def read_meeting(source: Source, seed: int, positions: np.ndarray, meeting: RowsThatMeet) -> Any:
    """Return the rows at some of the first positions, of which those from `APART` on meet the ones before."""
    firsts = ids_at(source, seed, positions % APART)
    given = source.read(firsts, positions)
    if meeting is RowsThatMeet.SAMPLES:
        return given
    return tree_map(
        lambda own, first: first if _is_label(own, len(positions)) else own,
        source.read(ids_at(source, seed, positions), positions),
        given,
    )


def _is_label(leaf: object, rows: int) -> bool:
    """Return whether an entry of a batch is a whole number for each row."""
    if not isinstance(leaf, torch.Tensor) or leaf.shape != (rows,):
        return False
    return not (leaf.is_floating_point() or leaf.is_complex())
